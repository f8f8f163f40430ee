"""The mismatch of rows that teach nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.models import tiny_qwen3
from support.rows import group, trajectory
from support.sequences import sampled
from unbroken.errors import PolicyMismatchError
from unbroken.ledger.tree import export_samples
from unbroken.rollout.trajectory import TrajectoryStatus
from unbroken.training.config import TrainerConfig
from unbroken.training.metrics.mismatch import mismatch_of_rows
from unbroken.training.objective.advantages import grpo_advantages
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.trainer import Trainer
from unbroken.training.untrained import UntrainedRows, ZeroVariance

FAILED = trajectory(None, status=TrajectoryStatus.FAILED)
MEMBERS = [trajectory(1.0, prompt=(k, 6), completion=sampled(*range(7, 8 + k))) for k in range(5)]
ROWS = [export_samples(member.tree, 0.0) for member in MEMBERS]


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(tiny_qwen3(), TrainerConfig())


def test_a_group_without_variance_has_one_reward_and_two_members_left_to_compare():
    varied, alone = group(trajectory(1.0), trajectory(2.0)), group(trajectory(1.0), FAILED)
    found = [PolicyGradient().has_variance(each, TrainerConfig()) for each in (varied, group(*MEMBERS, FAILED), alone)]
    assert found == [True, False, True]


def test_rewards_that_differ_by_rounding_are_one_reward_as_they_are_for_advantages():
    rounded = [trajectory(0.1 + 0.2), trajectory(0.3)]
    assert not grpo_advantages([each.reward for each in rounded]).any()
    assert not PolicyGradient().has_variance(group(*rounded), TrainerConfig())


def test_all_of_them_scored_is_the_mismatch_of_all_their_rows(trainer):
    found = UntrainedRows(trainer=trainer, rows=ROWS, num_scored=99).compare()
    rows = [row for of_member in ROWS for row in of_member]
    expected = mismatch_of_rows(rows, trainer.logprobs(rows))
    assert found.num_tokens == found.scored.num_tokens == 15
    assert found.scored.k3 == pytest.approx(expected.k3)
    assert found.scored.max_abs == pytest.approx(expected.max_abs)


@pytest.mark.parametrize(("num_scored", "num_tokens"), [(1, 1), (2, 1 + 4), (3, 1 + 3 + 5)])
def test_some_of_them_are_scored_evenly_spread(trainer, num_scored, num_tokens):
    found = UntrainedRows(trainer=trainer, rows=ROWS, num_scored=num_scored).compare()
    assert found.scored.num_tokens == num_tokens
    assert found.num_tokens == 15


class CountingTrainer:
    """Counts the calls that score rows."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.num_calls = trainer, 0

    def __getattr__(self, name: str) -> Any:
        self.num_calls += name in ("score", "logprobs")
        return getattr(self._trainer, name)


@pytest.mark.parametrize(("temperature", "num_calls"), [(1.0, 1), (0.5, 2)])
def test_rows_that_are_scored_for_a_record_take_those_of_their_temperature_along(trainer, temperature, num_calls):
    counting = CountingTrainer(trainer)
    others = [replace(row, temperature=temperature) for row in (*ROWS[1], *ROWS[4])]
    untrained = UntrainedRows(trainer=counting, rows=ROWS, num_scored=2)
    for found, expected in zip(untrained.score(others), trainer.score(others), strict=True):
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-5)
        np.testing.assert_array_equal(found.ranks, expected.ranks)
    alone = UntrainedRows(trainer=trainer, rows=ROWS, num_scored=2).compare()
    together = untrained.compare()
    assert counting.num_calls == num_calls
    assert (together.num_tokens, together.scored.num_tokens) == (alone.num_tokens, alone.scored.num_tokens)
    assert together.scored.k3 == pytest.approx(alone.scored.k3)


def test_a_policy_that_is_another_is_found_whoever_scored_its_rows(trainer):
    bounded = Trainer(trainer.backend.policy.model, TrainerConfig(max_policy_k3=1e-6))
    for others in ([], ROWS[4]):
        untrained = UntrainedRows(trainer=bounded, rows=ROWS, num_scored=2)
        untrained.score(others)
        with pytest.raises(PolicyMismatchError, match="two policies"):
            untrained.compare()


def test_kl_weighs_both_parts_by_their_ids(trainer):
    scored = UntrainedRows(trainer=trainer, rows=ROWS, num_scored=2).compare().scored
    metrics = ZeroVariance(num_tokens=100, scored=scored).get_metrics(
        {"train/num_loss_tokens": 300, "mismatch/k3": 0.5}
    )
    assert metrics["mismatch/kl"] == pytest.approx((300 * 0.5 + 100 * scored.k3) / 400)


def test_without_such_rows_kl_is_that_of_the_trained_ones_and_without_a_score_it_is_none(trainer):
    trained = {"train/num_loss_tokens": 300, "mismatch/k3": 0.5}
    nothing = UntrainedRows(trainer=trainer, rows=[], num_scored=8).compare()
    assert (nothing.num_tokens, nothing.scored) == (0, None)
    assert nothing.get_metrics(trained)["mismatch/kl"] == 0.5
    unscored = UntrainedRows(trainer=trainer, rows=ROWS, num_scored=0).compare()
    assert unscored.get_metrics(trained)["mismatch/kl"] is None
    assert np.isclose(unscored.get_metrics(trained)["mismatch/num_zero_variance_tokens"], 15)
