"""Weights of loss tokens, against sums done by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import InvalidInputError
from unbroken.training.loss_config import LossNormalization
from unbroken.training.objective.losses import token_weight

ROWS = st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=6), min_size=1, max_size=5)


def weighted_sum(rows: list[list[float]], normalization: LossNormalization, most: int) -> float:
    num_loss_tokens = sum(map(len, rows))
    return math.fsum(
        loss
        * token_weight(
            normalization,
            num_trajectory_tokens=len(row),
            num_trajectories=len(rows),
            num_loss_tokens=num_loss_tokens,
            max_trajectory_tokens=most,
        )
        for row in rows
        for loss in row
    )


def by_hand(rows: list[list[float]], normalization: LossNormalization, most: int) -> Fraction:
    exact = [[Fraction(loss) for loss in row] for row in rows]
    if normalization is LossNormalization.TOKEN:
        everything = [loss for row in exact for loss in row]
        return sum(everything, Fraction()) / len(everything)
    if normalization is LossNormalization.SEQUENCE:
        means = [sum(row, Fraction()) / len(row) for row in exact]
        return sum(means, Fraction()) / len(means)
    return sum((sum(row, Fraction()) / most for row in exact), Fraction()) / len(exact)


@given(rows=ROWS, normalization=st.sampled_from(LossNormalization))
def test_the_weights_give_the_means_of_the_papers(rows: list[list[float]], normalization: LossNormalization) -> None:
    assert weighted_sum(rows, normalization, 6) == pytest.approx(float(by_hand(rows, normalization, 6)), abs=1e-12)


def test_the_worked_example() -> None:
    def weights(normalization: LossNormalization) -> list[float]:
        return [
            token_weight(
                normalization, num_trajectory_tokens=n, num_trajectories=2, num_loss_tokens=4, max_trajectory_tokens=4
            )
            for n in (3, 1)
        ]

    assert weights(LossNormalization.TOKEN) == [1 / 4, 1 / 4]
    assert weights(LossNormalization.SEQUENCE) == [1 / 6, 1 / 2]
    assert weights(LossNormalization.CONSTANT) == [1 / 8, 1 / 8]


@pytest.mark.parametrize("most", [None, 2])
def test_a_constant_must_be_given_and_no_row_may_exceed_it(most: int | None) -> None:
    with pytest.raises(InvalidInputError, match=f"max_trajectory_tokens must be .* got {most} for one of 3"):
        token_weight(
            LossNormalization.CONSTANT,
            num_trajectory_tokens=3,
            num_trajectories=1,
            num_loss_tokens=3,
            max_trajectory_tokens=most,
        )


def test_a_row_without_loss_tokens_has_no_weight() -> None:
    with pytest.raises(InvalidInputError, match="num_trajectory_tokens must be at least 1, got 0"):
        token_weight(LossNormalization.TOKEN, num_trajectory_tokens=0, num_trajectories=1, num_loss_tokens=3)
