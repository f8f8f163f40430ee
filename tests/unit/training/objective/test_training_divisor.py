"""What a step's loss is divided by: all completions, those of groups with equal rewards too, as in the papers and TRL.

Groups go the whole way through `make_units` and `step`. At the sampler's own weights every algorithm's gradient is that
of -advantage * logprob, so the papers' formulas are written down here by their divisors alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.gradients import SUBTRACT_GRADIENT, flatten, step_gradient
from support.models import tiny_qwen3
from support.rows import group, trajectory
from support.sequences import sampled
from support.slow_logprobs import slow_logprobs
from unbroken.counters import Counters
from unbroken.ledger.tree import export_samples
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup, TrajectoryStatus
from unbroken.training.config import TrainerConfig
from unbroken.training.loss_config import KlConfig, KlPlace, TruncatedRows, ZeroVarianceRows
from unbroken.training.objective.base import UpdateSize
from unbroken.training.objective.policy_gradient import ALGORITHMS, PolicyGradient
from unbroken.training.trainer import Trainer

REWARDS = ([1.0, 0.0, 1.0, 1.0], [1.0] * 4, [0.0, 0.0, 0.5, 0.0], [0.0] * 4, [1.0] * 4)
LENGTHS = ([2, 5, 3, 1], [9, 8, 7, 9], [4, 1, 6, 2], [3, 9, 9, 5], [1, 2, 1, 1])
MOST = 12
MEAN, STD = np.mean(np.concatenate(REWARDS)), np.std(np.concatenate(REWARDS))
CENTRED_STD = np.std(np.concatenate([np.subtract(rewards, np.mean(rewards)) for rewards in REWARDS]))
BY_GROUP = {
    "dr_grpo": lambda r: r - r.mean(),
    "rloo": lambda r: (r - r.mean()) * 4 / 3,
    "reinforce_plus_plus": lambda r: (r - MEAN) / STD,
    "reinforce_plus_plus_baseline": lambda r: (r - r.mean()) / CENTRED_STD,
}
"""The papers' advantages; the other algorithms have GRPO's."""
DIVISORS = {"gspo": "sequence", "gspo_token": "sequence", "sapo": "sequence", "dr_grpo": "constant"}
"""The other algorithms divide by all sampled ids."""


def grpo(rewards: Any) -> Any:
    return (rewards - rewards.mean()) / rewards.std() if rewards.std() else 0 * rewards


@pytest.fixture(scope="module")
def groups() -> list[TrajectoryGroup]:
    """Five groups of four, of which three have one reward, sampled by the very weights that are trained."""
    rng = np.random.default_rng(3)
    model = tiny_qwen3()
    found = []
    for number, (rewards, lengths) in enumerate(zip(REWARDS, LENGTHS, strict=True)):
        drawn = [(rng.integers(0, 64, 3).tolist(), rng.integers(0, 64, length).tolist()) for length in lengths]
        members = [trajectory(0.0, prompt=prompt, completion=sampled(*ids)) for prompt, ids in drawn]
        logprobs = slow_logprobs(model, [row for each in members for row in export_samples(each.tree, 0.0)])
        exact = [
            replace(sampled(*ids), rollout_logprobs=v.tolist()) for (_, ids), v in zip(drawn, logprobs, strict=True)
        ]
        members = [
            trajectory(reward, prompt=prompt, completion=completion)
            for reward, (prompt, _), completion in zip(rewards, drawn, exact, strict=True)
        ]
        found.append(TrajectoryGroup(group_id=str(number), trajectories=tuple(members)))
    return found


def make_units(objective: PolicyGradient, config: TrainerConfig, groups: Sequence[TrajectoryGroup]) -> list[Any]:
    return asyncio.run(objective.make_units(groups, Counters(), config))


def gradient_of(groups: Sequence[TrajectoryGroup], name: str, **settings: Any) -> torch.Tensor:
    """The gradient of one step, by what it subtracts from the weights."""
    settings = {"max_trajectory_tokens": MOST if name == "dr_grpo" else None, **settings}
    config = TrainerConfig(optimizer=SUBTRACT_GRADIENT, tokens_per_micro_batch=30, **settings)
    objective = ALGORITHMS[name]
    reference = tiny_qwen3(seed=1) if config.kl_weight else None
    trainer = Trainer(tiny_qwen3(), config, objective=objective, reference=reference)
    return flatten(step_gradient(trainer, make_units(objective, config, groups))[1]).float()


def gradient_by_hand(groups: Sequence[TrajectoryGroup], name: str) -> torch.Tensor:
    model = tiny_qwen3()
    members: list[Trajectory] = [member for each in groups for member in each.trajectories]
    logprobs = slow_logprobs(model, [row for each in members for row in export_samples(each.tree, 0.0)])
    advantages = np.concatenate([BY_GROUP.get(name, grpo)(np.array(rewards)) for rewards in REWARDS])
    divisors = {
        "token": [sum(map(len, logprobs))] * len(members),
        "sequence": [len(members) * len(values) for values in logprobs],
        "constant": [len(members) * MOST] * len(members),
    }[DIVISORS.get(name, "token")]
    losses = [-a * values.sum() / d for a, values, d in zip(advantages, logprobs, divisors, strict=True)]
    sum(losses).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


BY_REWARDS = sorted({*ALGORITHMS} - {"distillation"})
"""Algorithms that learn from rewards alone."""


@pytest.mark.parametrize("name", BY_REWARDS)
def test_all_completions_of_a_step_count_in_the_divisor_of_every_algorithm(groups, name):
    ours, theirs = gradient_of(groups, name), gradient_by_hand(groups, name)
    assert theirs.norm() > 0.02
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "place"), [*((name, KlPlace.LOSS) for name in BY_REWARDS), ("dr_grpo", KlPlace.REWARD)]
)
def test_a_distance_of_almost_no_weight_changes_no_gradient(groups, name, place):
    """A trajectory without a reward is trained on for its distance alone, and counts without it too."""
    unscored = trajectory(None, status=TrajectoryStatus.UNSCORED, completion=sampled(*range(9)))
    steps = [*groups[:-1], group(*groups[-1].trajectories, unscored)]
    without = gradient_of(steps, name)
    almost = gradient_of(steps, name, kl_weight=1e-9, kl=KlConfig(place=place))
    assert (without - almost).norm() < 1e-6 * max(1.0, float(without.norm()))


def test_leaving_out_groups_of_equal_rewards_is_a_choice_that_scales_the_rest(groups):
    """By the ids, by the trajectories, and by the trajectories times a constant."""
    all_ids, kept_ids = sum(map(sum, LENGTHS)), sum(LENGTHS[0]) + sum(LENGTHS[2])
    for name, factor in (("grpo", all_ids / kept_ids), ("sapo", 20 / 8), ("dr_grpo", 20 / 8)):
        counted, dropped = gradient_of(groups, name), gradient_of(groups, name, zero_variance=ZeroVarianceRows.DROP)
        torch.testing.assert_close(dropped, counted * factor, atol=2e-6, rtol=1e-4)


def test_groups_that_are_dropped_are_not_trained_for_their_distance_either(groups):
    config = TrainerConfig(zero_variance=ZeroVarianceRows.DROP, kl_weight=0.1, entropy_weight=0.1)
    units = make_units(PolicyGradient(), config, groups)
    assert sum(len(unit.rows) for unit in units) == 8


def test_groups_of_equal_rewards_are_trained_for_the_entropy_bonus(groups):
    units = make_units(PolicyGradient(), TrainerConfig(entropy_weight=0.1), groups)
    assert sum(len(unit.rows) for unit in units) == 20


def test_a_masked_trajectory_counts_as_one_without_ids(groups):
    """As in TRL: its ids are masked, and the mean over trajectories is one of all of them."""
    members = [
        trajectory(reward, completion=sampled(*range(4)), status=status)
        for reward, status in ((1.0, "completed"), (0.0, "completed"), (0.5, "truncated"))
    ]
    masked = [group(*members)]
    for name, factor in (("grpo", 1.0), ("sapo", 2 / 3), ("dr_grpo", 2 / 3)):
        kept = gradient_of(masked, name, truncated=TruncatedRows.MASK)
        dropped = gradient_of(masked, name, truncated=TruncatedRows.MASK, zero_variance=ZeroVarianceRows.DROP)
        torch.testing.assert_close(kept, dropped * factor, atol=2e-6, rtol=1e-4)


class Noting(PolicyGradient):
    sizes: list[UpdateSize] = []  # noqa: RUF012

    def weigh(self, units: Any, config: TrainerConfig, *, size: UpdateSize, score: Any) -> Any:
        self.sizes.append(size)
        return super().weigh(units, config, size=size, score=score)


def test_minibatches_share_all_completions_among_them(groups):
    config = TrainerConfig(num_minibatches=2)
    trainer = Trainer(tiny_qwen3(), config, objective=Noting())
    stats = trainer.step(make_units(PolicyGradient(), config, groups))
    assert [size.num_units for size in Noting.sizes] == [size.num_rows for size in Noting.sizes] == [10, 10]
    assert sum(size.num_loss_tokens for size in Noting.sizes) == sum(map(sum, LENGTHS))
    assert (stats.num_rows, stats.num_loss_tokens) == (8, sum(LENGTHS[0]) + sum(LENGTHS[2]))


def test_a_step_whose_groups_all_have_equal_rewards_is_refused(groups):
    trainer = Trainer(tiny_qwen3(), TrainerConfig())
    with pytest.raises(Exception, match="a step needs at least one row to train in any process, got none"):
        trainer.step(make_units(PolicyGradient(), TrainerConfig(), groups[-2:]))
