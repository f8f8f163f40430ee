"""Online DPO's pairs and loss, against numbers computed otherwise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import InvalidInputError, RewardError
from unbroken.training.preferences import best_and_worst, dpo_loss

SUMS = st.tuples(*[st.floats(-40, 0)] * 4)


@given(sums=st.lists(SUMS, min_size=1, max_size=5), beta=st.floats(0.01, 2))
def test_the_loss_is_the_paper_s(sums: list[tuple[float, float, float, float]], beta: float) -> None:
    losses = dpo_loss(*torch.tensor(sums, dtype=torch.float64).T, beta=beta)
    for loss, (chosen, rejected, reference_chosen, reference_rejected) in zip(losses.tolist(), sums, strict=True):
        margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
        expected = math.log1p(math.exp(-margin)) if margin > 0 else -margin + math.log1p(math.exp(margin))
        assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_worked_example_and_its_gradient() -> None:
    chosen, rejected = torch.tensor([-2.0], requires_grad=True), torch.tensor([-3.0], requires_grad=True)
    loss = dpo_loss(chosen, rejected, torch.tensor([-3.0]), torch.tensor([-2.0]), beta=0.5)
    assert loss.item() == pytest.approx(0.3133, abs=1e-4)
    loss.sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.item() == pytest.approx(-0.5 / (1 + math.e), rel=1e-6)
    assert rejected.grad.item() == pytest.approx(0.5 / (1 + math.e), rel=1e-6)


def test_a_policy_that_is_its_reference_loses_log_two() -> None:
    sums = torch.tensor([-3.0, -5.0])
    assert dpo_loss(sums, sums - 1, sums, sums - 1).tolist() == pytest.approx([math.log(2)] * 2)


@pytest.mark.parametrize(
    ("scores", "pair"), [([1, 3, 0, 3], (1, 2)), ([2, 2], None), ([0.5], None), ([-1, -2], (0, 1))]
)
def test_the_best_and_the_worst_make_a_pair_and_equals_make_none(
    scores: list[float], pair: tuple[int, int] | None
) -> None:
    assert best_and_worst(scores) == pair


def test_a_score_that_is_no_number_is_refused() -> None:
    with pytest.raises(RewardError, match=r"rewards\[1\]"):
        best_and_worst([1.0, math.nan])


def test_shapes_that_differ_and_a_beta_that_is_not_positive_are_refused() -> None:
    pair = torch.zeros(2)
    with pytest.raises(InvalidInputError, match="must share one shape"):
        dpo_loss(pair, pair, pair, torch.zeros(3))
    with pytest.raises(InvalidInputError, match="beta must be > 0, got 0"):
        dpo_loss(pair, pair, pair, pair, beta=0)
