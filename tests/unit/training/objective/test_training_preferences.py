"""Online DPO's pairs and loss, against numbers computed otherwise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import RewardError
from unbroken.training.objective.online_dpo import dpo_loss, dpo_pull
from unbroken.training.objective.pairs import best_and_worst, outside_in, scores_of_ranking


@given(margins=st.lists(st.floats(-80, 80), min_size=1, max_size=5), beta=st.floats(0.01, 2))
def test_the_loss_is_the_paper_s(margins: list[float], beta: float) -> None:
    losses = dpo_loss(torch.tensor(margins, dtype=torch.float64), beta=beta)
    for loss, margin in zip(losses.tolist(), margins, strict=True):
        x = beta * margin
        expected = math.log1p(math.exp(-x)) if x > 0 else -x + math.log1p(math.exp(x))
        assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(margins=st.lists(st.floats(-80, 80), min_size=1, max_size=5), beta=st.floats(0.01, 2))
def test_the_pull_is_what_autograd_makes_of_the_loss(margins: list[float], beta: float) -> None:
    margin_P = torch.tensor(margins, dtype=torch.float64, requires_grad=True)
    dpo_loss(margin_P, beta=beta).sum().backward()
    assert margin_P.grad is not None
    torch.testing.assert_close(dpo_pull(margin_P.detach(), beta=beta), -margin_P.grad)


def test_the_worked_examples() -> None:
    margin_P = torch.tensor([2.0])
    assert dpo_loss(margin_P, beta=0.5).item() == pytest.approx(0.3133, abs=1e-4)
    assert dpo_pull(margin_P, beta=0.5).item() == pytest.approx(0.1345, abs=1e-4)


def test_a_policy_that_is_its_reference_loses_log_two() -> None:
    assert dpo_loss(torch.zeros(2), beta=0.1).tolist() == pytest.approx([math.log(2)] * 2)


@pytest.mark.parametrize(
    ("scores", "pairs"),
    [([1, 3, 0, 3], [(1, 2)]), ([2, 2], []), ([0.5], []), ([-1, -2], [(0, 1)]), ([0.1 + 0.2, 0.3], [])],
)
def test_the_best_and_the_worst_make_a_pair_and_equals_make_none(
    scores: list[float], pairs: list[tuple[int, int]]
) -> None:
    assert best_and_worst(scores) == pairs


@pytest.mark.parametrize(
    ("scores", "pairs"),
    [([1, 0, 1, 1, 0], [(0, 4), (2, 1)]), ([1, 3, 0, 3], [(1, 2), (3, 0)]), ([1, 1, 1, 0], [(0, 3)]), ([2, 2], [])],
)
def test_outside_in_pairs_each_member_at_most_once(scores: list[float], pairs: list[tuple[int, int]]) -> None:
    assert outside_in(scores) == pairs


@given(st.permutations(range(6)))
def test_the_scores_of_a_ranking_order_the_members_as_it_does(ranking: list[int]) -> None:
    assert np.argsort(-np.asarray(scores_of_ranking(ranking))).tolist() == ranking


@pytest.mark.parametrize("ranking", [[0, 0], [1, 2], [0, 2]])
def test_a_ranking_that_does_not_name_each_member_once_is_refused(ranking: list[int]) -> None:
    with pytest.raises(RewardError, match="must name each of 2 members once"):
        scores_of_ranking(ranking)


@pytest.mark.parametrize("pairs", [best_and_worst, outside_in])
def test_a_score_that_is_no_number_is_refused(pairs) -> None:
    with pytest.raises(RewardError, match=r"rewards\[1\]"):
        pairs([1.0, math.nan])
