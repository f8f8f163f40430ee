"""Corrections for the gap between sampler and trainer, against a loop in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import InvalidInputError
from unbroken.training.loss_config import Correction, CorrectionKind
from unbroken.training.model.batch import TrajectorySums
from unbroken.training.objective.losses import correction_weights

ROWS = st.lists(st.lists(st.tuples(st.floats(-4, 0), st.floats(-4, 0)), min_size=1, max_size=5), max_size=5)


def by_hand(rows: list[list[tuple[float, float]]], correction: Correction) -> list[float]:
    weights = []
    low, high = correction.bounds
    for row in rows:
        product = math.prod(math.exp(trainer - sampler) for trainer, sampler in row)
        for trainer, sampler in row:
            ratio = math.exp(trainer - sampler)
            match correction.kind:
                case CorrectionKind.NONE:
                    weights.append(1.0)
                case CorrectionKind.TOKEN_TRUNCATE | CorrectionKind.TIS:
                    weights.append(min(ratio, high))
                case CorrectionKind.TOKEN_MASK | CorrectionKind.ICEPOP:
                    weights.append(ratio if low <= ratio <= high else 0.0)
                case CorrectionKind.SEQUENCE_TRUNCATE:
                    weights.append(min(product, high))
                case CorrectionKind.SEQUENCE_MASK | CorrectionKind.MIS:
                    weights.append(product if low <= product <= high else 0.0)
    return weights


def tensors(rows: list[list[tuple[float, float]]]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    flat = torch.tensor([pair for row in rows for pair in row], dtype=torch.float64).reshape(-1, 2)
    return flat[:, 0], flat[:, 1], [len(row) for row in rows]


@given(rows=ROWS, kind=st.sampled_from(CorrectionKind), low=st.sampled_from([0.0, 0.3]), high=st.floats(1.1, 5))
def test_every_kind_is_its_definition(
    rows: list[list[tuple[float, float]]], kind: CorrectionKind, low: float, high: float
) -> None:
    correction = Correction(kind=kind, low=low, high=high)
    weights, beyond = correction_weights(*tensors(rows), correction)
    expected = by_hand(rows, correction)
    assert weights.tolist() == pytest.approx(expected, rel=1e-9)
    masked = [weight == 0 for weight in expected]
    products = [math.exp(math.fsum(t - s for t, s in row)) for row in rows for _ in row]
    changed = {
        CorrectionKind.NONE: [False] * len(expected),
        CorrectionKind.TOKEN_TRUNCATE: [math.exp(t - s) > high for row in rows for t, s in row],
        CorrectionKind.TOKEN_MASK: masked,
        CorrectionKind.SEQUENCE_TRUNCATE: [product > high for product in products],
        CorrectionKind.SEQUENCE_MASK: masked,
    }
    assert beyond.tolist() == changed[correction.effect]


@pytest.mark.parametrize(
    ("kind", "effect", "bounds"),
    [
        (CorrectionKind.TIS, CorrectionKind.TOKEN_TRUNCATE, (0, 2)),
        (CorrectionKind.MIS, CorrectionKind.SEQUENCE_MASK, (0, 2)),
        (CorrectionKind.ICEPOP, CorrectionKind.TOKEN_MASK, (0.5, 5)),
        (CorrectionKind.SEQUENCE_TRUNCATE, CorrectionKind.SEQUENCE_TRUNCATE, (0, 2)),
    ],
)
def test_a_name_stands_for_a_kind_and_its_usual_bounds(kind, effect, bounds):
    assert (Correction(kind=kind).effect, Correction(kind=kind).bounds) == (effect, bounds)
    assert Correction(kind=kind, low=0.25, high=3).bounds == (0.25, 3)


def test_a_trajectory_of_several_rows_has_one_product_over_all_of_them():
    """Ratios 1.5 | 1.2 in two rows of one trajectory, in two passes: both rows have the product 1.8."""
    correction = Correction(kind=CorrectionKind.SEQUENCE_MASK, low=0.6, high=1.7)
    gap = math.log(1.5) + math.log(1.2)
    sums = TrajectorySums(num_tokens=2, log_ratio=None, sampler_gap=gap)
    for ratio in (1.5, 1.2):
        logprobs = torch.tensor([ratio]).log()
        alone = correction_weights(logprobs, torch.zeros(1), [1], correction)
        assert alone.weights_N.tolist() == [pytest.approx(ratio)]
        assert correction_weights(logprobs, torch.zeros(1), [1], correction, [sums]).weights_N.tolist() == [0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (CorrectionKind.TOKEN_TRUNCATE, [1.5, 1.8, 1, 0.5]),
        (CorrectionKind.TOKEN_MASK, [1.5, 0, 1, 0]),
        (CorrectionKind.SEQUENCE_TRUNCATE, [1.8, 1.8, 0.5, 0.5]),
        (CorrectionKind.SEQUENCE_MASK, [0, 0, 0, 0]),
    ],
)
def test_the_worked_example(kind: CorrectionKind, expected: list[float]) -> None:
    ratios = torch.tensor([1.5, 2, 1, 0.5])
    correction = Correction(kind=kind, low=0.6, high=1.8)
    weights, _ = correction_weights(ratios.log(), torch.zeros(4), [2, 2], correction)
    assert weights.tolist() == pytest.approx(expected, rel=1e-6)


def test_weights_have_no_gradient() -> None:
    logprobs = torch.zeros(2, requires_grad=True)
    assert not correction_weights(
        logprobs, torch.ones(2), [2], Correction(kind=CorrectionKind.TOKEN_TRUNCATE)
    ).weights_N.requires_grad


def test_rows_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"got \(3,\), \(3,\) and 2"):
        correction_weights(torch.zeros(3), torch.zeros(3), [2], Correction())


@pytest.mark.parametrize(("low", "high"), [(-0.1, 2), (1, 2), (0, 1)])
def test_bounds_that_shut_out_equal_policies_are_refused(low: float, high: float) -> None:
    with pytest.raises(InvalidInputError, match="0 <= low < 1 < high"):
        Correction(low=low, high=high)
