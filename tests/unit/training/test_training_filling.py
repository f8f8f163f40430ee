"""Dynamic sampling without staleness: steps are filled up, within a bound, and no problem is lost or doubled."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from support.loops import Callbacks
from support.models import tiny_qwen3
from support.pretend import PretendTrainer, has_variance, pretend_to_train
from support.rows import group, trajectory
from support.sequences import sampled
from support.steps import train
from unbroken.errors import InvalidInputError, RewardError, ServerUnreachableError
from unbroken.rollout.trajectory import TrajectoryGroup, TrajectoryStatus
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig, OutageConfig, TrainerConfig
from unbroken.training.groups import GroupSource
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.objective.advantages import StepAdvantages
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.trainer import Trainer
from unbroken.weights.base import WeightUpdate

VARIED, EQUAL = (0.0, 1.0), (1.0, 1.0)


class Problems(GroupSource):
    """Groups of two; `rewards` says which. They finish in a random order."""

    def __init__(self, groups_per_step: int, rewards, *, seed: int = 0) -> None:
        self.groups_per_step = groups_per_step
        self.rewards = rewards
        self.rng = random.Random(seed)
        self.sampled: list[int] = []
        self.trained: list[list[int]] = []
        self.policy_version = 0
        self.healthy = True
        self.is_away = False

    async def sample(self, number: int) -> TrajectoryGroup:
        self.sampled.append(number)
        for _ in range(self.rng.randint(0, 5)):
            await asyncio.sleep(0)
        rewards = self.rewards(number)
        members = (
            trajectory(reward, completion=sampled(5, 9, versions=[self.policy_version] * 2), name=str(number))
            for reward in rewards
        )
        return group(*members)

    async def publish(self, named_parameters, *, policy_version) -> WeightUpdate:
        list(named_parameters)
        self.policy_version = policy_version
        return WeightUpdate(num_bytes=1, seconds=0.0)

    async def check_health(self) -> None:
        if not self.healthy:
            raise ServerUnreachableError("away")

    @property
    def engine(self):
        return self

    vocab_size = 64


def number_of(each: TrajectoryGroup) -> int:
    return int(each.trajectories[0].trajectory_id)


async def run(problems: Problems, directory, *, num_steps=3, max_replacements=2.0, **options) -> list[dict]:
    async def on_rollouts(rollouts) -> None:
        rows = [row for unit in rollouts.units for row in unit.rows]
        assert len(rows) % 2 == 0
        problems.trained.append([number_of(each) for each in rollouts.groups])

    trainer = options.pop("trainer", None) or Trainer(tiny_qwen3(), TrainerConfig())
    with MetricsWriter(directory) as metrics:
        await train(
            problems,
            trainer=trainer,
            publisher=problems,
            metrics=metrics,
            config=LoopConfig(
                num_steps=num_steps, max_replacements=max_replacements, outages=OutageConfig(ask_every_s=0.01, wait_s=5)
            ),
            observer=Callbacks(on_rollouts=on_rollouts),
            **options,
        )
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@settings(max_examples=num_cases(30, in_fuzz=1000))
@given(
    seed=st.integers(0, 10**6), groups_per_step=st.integers(1, 5), max_replaced=st.integers(0, 6), share=st.floats(0, 1)
)
def test_a_step_samples_the_same_numbers_in_whatever_order_they_finish(seed, groups_per_step, max_replaced, share):
    equal = random.Random(seed)
    rewards = {number: EQUAL if equal.random() < share else VARIED for number in range(200)}

    async def fill(order: int):
        problems = Problems(groups_per_step, rewards.__getitem__, seed=order)
        trainer = PretendTrainer(lambda step: 0)
        config = LoopConfig(num_steps=4, max_replacements=(max_replaced + 0.5) / groups_per_step, max_empty_steps=None)
        await pretend_to_train(problems, problems, trainer, config)
        for groups, of_step in zip(trainer.groups, trainer.sampled, strict=True):
            replaced = of_step[len(groups) :]
            assert len(groups) == groups_per_step
            assert not any(map(has_variance, replaced))
            full = all(map(has_variance, groups))
            assert full or len(replaced) == max_replaced
            for part in (groups, replaced):
                assert list(map(number_of, part)) == sorted(map(number_of, part))
        steps = [sorted(map(number_of, of_step)) for of_step in trainer.sampled]
        assert [number for step in steps for number in step] == list(range(len(problems.sampled)))
        return steps

    assert asyncio.run(fill(1)) == asyncio.run(fill(2))


async def test_groups_of_equal_rewards_are_replaced_until_the_step_is_full_and_counted(tmp_path):
    problems = Problems(2, lambda number: EQUAL if number in (1, 2, 6) else VARIED)
    logged = await run(problems, tmp_path)
    assert [sorted(step) for step in problems.trained] == [[0, 1, 2, 3], [4, 5], [6, 7, 8]]
    assert [line["train/num_rows"] for line in logged] == [4, 4, 4]
    assert [line["groups/num_replaced"] for line in logged] == [2, 0, 1]
    assert [line["groups/num_replaced_tokens"] for line in logged] == [8, 0, 4]
    assert [line["groups/num"] for line in logged] == [4, 2, 3]
    assert [line["groups/num_zero_variance"] for line in logged] == [2, 0, 1]
    assert [line["counters/dropped_rows"] for line in logged] == [4, 0, 2]
    assert [line["reward/mean"] for line in logged] == [0.75, 0.5, pytest.approx(4 / 6)]
    assert [line["groups/kept_reward_mean"] for line in logged] == [0.5, 0.5, 0.5]
    assert [line["mismatch/num_zero_variance_tokens"] for line in logged] == [8, 0, 4]


async def test_at_the_bound_the_step_trains_on_what_there_is(tmp_path):
    problems = Problems(2, lambda number: VARIED if number % 7 == 0 else EQUAL)
    logged = await run(problems, tmp_path, max_replacements=1.5)
    assert [sorted(step) for step in problems.trained] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    assert [line["train/num_rows"] for line in logged] == [2, 2, 2]
    assert [line["groups/num_replaced"] for line in logged] == [3, 3, 3]


async def test_replaced_groups_are_counted_by_reason_also_if_the_loss_has_another_term(tmp_path):
    problems = Problems(2, lambda number: EQUAL if number in (1, 2) else VARIED)
    trainer = Trainer(tiny_qwen3(), TrainerConfig(entropy_weight=0.1))
    logged = await run(problems, tmp_path, num_steps=2, trainer=trainer)
    assert [line["train/num_rows"] for line in logged] == [4, 4]
    assert [line["counters/dropped_rows"] for line in logged] == [4, 0]
    assert [line["mismatch/num_zero_variance_tokens"] for line in logged] == [8, 0]


async def test_failed_groups_are_not_replaced_but_counted(tmp_path):
    """They say nothing about the problem, and a broken environment would use up all problems."""

    class Failing(Problems):
        async def sample(self, number: int) -> TrajectoryGroup:
            whole = await super().sample(number)
            if number % 2:
                return whole
            failed = trajectory(None, status=TrajectoryStatus.FAILED, completion=None, name=str(number))
            return group(failed, failed)

    logged = await run(Failing(2, lambda number: VARIED), tmp_path)
    assert [line["groups/num_replaced"] for line in logged] == [0, 0, 0]


async def test_a_resumed_run_goes_on_after_the_last_replaced_problem(tmp_path):
    def rewards(number: int):
        return EQUAL if number % 3 == 0 else VARIED

    whole = Problems(2, rewards)
    await run(whole, tmp_path / "whole", num_steps=5)
    first, second = Problems(2, rewards), Problems(2, rewards)
    for problems, num_steps in ((first, 2), (second, 5)):
        await run(problems, tmp_path / "parts", num_steps=num_steps, checkpoints=Checkpoints(tmp_path / "checkpoints"))
    assert first.trained + second.trained == whole.trained
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "parts")]
    of_steps = [[json.loads(line)["groups/num_replaced"] for line in of_run] for of_run in lines]
    assert of_steps[0] == of_steps[1]
    third = Problems(2, rewards)
    await run(
        third, tmp_path / "more", max_replacements=0, num_steps=6, checkpoints=Checkpoints(tmp_path / "checkpoints")
    )
    assert sorted(third.trained[0]) == [len(whole.sampled), len(whole.sampled) + 1]


async def test_a_step_that_lost_its_engine_is_sampled_again_from_the_same_numbers(tmp_path):
    lost = []

    def rewards(number: int):
        if number == 4 and not lost:
            lost.append(number)
            raise ServerUnreachableError("the server went away")
        return EQUAL if number in (1, 3) else VARIED

    problems = Problems(2, rewards)
    logged = await run(problems, tmp_path, engine=problems)
    assert [sorted(step) for step in problems.trained] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [line["outages/num_losses"] for line in logged] == [0, 1, 0]


async def test_an_error_ends_the_run_and_leaves_nothing_in_flight(tmp_path):
    def rewards(number: int):
        if number == 3:
            raise RewardError("row 3")
        return VARIED

    with pytest.raises(RewardError, match="row 3"):
        await run(Problems(2, rewards), tmp_path)


async def test_what_can_replace_no_group_is_refused(tmp_path):
    compares = PolicyGradient(StepAdvantages(lambda groups: groups, compares_groups=True))
    trainer = Trainer(tiny_qwen3(), TrainerConfig(), objective=compares)
    with pytest.raises(InvalidInputError, match=r"max_replacements must be 0, because the trainer's objective"):
        await run(Problems(2, lambda _: VARIED), tmp_path, trainer=trainer)
    with pytest.raises(InvalidInputError, match=r"source must be a GroupSource"):
        await run(Problems(2, lambda _: VARIED).sample, tmp_path)


def test_equal_rewards_are_kept_by_advantages_without_a_baseline():
    """What is replaced is what has no advantage, by the advantages themselves."""
    assert PolicyGradient(lambda rewards: rewards).has_variance(group(*map(trajectory, EQUAL)), TrainerConfig())
