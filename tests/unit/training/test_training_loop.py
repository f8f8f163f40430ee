"""The loop, with a real engine: it learns, weights and versions arrive, and dropped steps are no accident."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest

from support.loops import Callbacks
from support.models import tiny_qwen3
from support.rows import at_version, group, trajectory
from support.steps import train
from unbroken.counters import Counters, Event
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import InvalidInputError, RewardError, RolloutError
from unbroken.rollout.trajectory import TrajectoryGroup, TrajectoryStatus
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.groups import GroupSource
from unbroken.training.loss_config import DpoConfig
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.objective.advantages import grpo_advantages, rloo_advantages
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.objective.pairs import outside_in
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.observer import RunObserver
from unbroken.training.trainer import Trainer
from unbroken.types import SampleRequest, SamplingParams, token_ids
from unbroken.weights.base import InProcessPublisher, WeightUpdate

PROMPT = (1, 2)


class Bandit(GroupSource):
    """Samples single ids after the prompt from an engine; id 9 is worth 1."""

    groups_per_step = 1

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.share_right: list[float] = []
        self.versions: list[int] = []

    async def sample(self, number: int) -> TrajectoryGroup:
        params = SamplingParams(max_tokens=1, seed=number)
        request = SampleRequest(request_id=str(number), prompt_ids=token_ids(PROMPT), params=params, n=64)
        sequences = (await self.engine.sample(request)).sequences
        rewards = [float(sequence.completion_ids[0] == 9) for sequence in sequences]
        self.share_right.append(sum(rewards) / len(rewards))
        self.versions.append(sequences[0].version_spans[0].policy_version)
        return group(*[trajectory(r, prompt=PROMPT, completion=s) for r, s in zip(rewards, sequences, strict=True)])


class Nothing:
    """A publisher to nowhere, that keeps what it was given."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def publish(self, named_parameters, *, policy_version) -> WeightUpdate:
        assert len(list(named_parameters)) > 0
        self.versions.append(policy_version)
        return WeightUpdate(num_bytes=12, seconds=0.5)


def make_trainer(advantages=grpo_advantages, *, learning_rate: float = 3e-3) -> Trainer:
    config = TrainerConfig(optimizer=OptimizerConfig(learning_rate=learning_rate))
    return Trainer(tiny_qwen3(), config, objective=PolicyGradient(advantages))


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def make_dpo_trainer() -> Trainer:
    config = TrainerConfig(optimizer=OptimizerConfig(learning_rate=3e-3), dpo=DpoConfig(beta=0.1))
    return Trainer(tiny_qwen3(), config, objective=OnlineDpo(pairs=outside_in), reference=tiny_qwen3())


@pytest.mark.parametrize(
    "make", [make_trainer, lambda: make_trainer(rloo_advantages), make_dpo_trainer], ids=["grpo", "rloo", "online dpo"]
)
async def test_a_bandit_is_learnt_through_engine_loop_and_publisher(tmp_path, make):
    engine = TransformersEngine(tiny_qwen3())
    bandit = Bandit(engine)
    with MetricsWriter(tmp_path) as metrics:
        await train(
            bandit,
            trainer=make(),
            publisher=InProcessPublisher(engine),
            metrics=metrics,
            config=LoopConfig(num_steps=12),
        )
    await engine.close()
    logged = lines(tmp_path)
    trained = [line for line in logged if line["train/num_rows"]]
    assert bandit.share_right[0] < 0.2
    assert bandit.share_right[-1] > 0.8
    assert engine.policy_version == trained[-1]["train/policy_version"] == len(trained)
    assert bandit.versions == [sum(line["train/num_rows"] > 0 for line in logged[:k]) for k in range(len(logged))]
    assert [line["reward/mean"] for line in logged] == pytest.approx(bandit.share_right)
    assert all(line["mismatch/max_abs"] < 1e-4 for line in trained)
    assert all(line["staleness/max"] == 0 for line in trained)


class Steps(GroupSource):
    """One group a step, as if the trainer's weights had sampled it."""

    groups_per_step = 1

    def __init__(self, groups: Sequence[TrajectoryGroup], trainer: Trainer) -> None:
        self.groups = groups
        self.trainer = trainer

    async def sample(self, number: int) -> TrajectoryGroup:
        return at_version(self.groups[number], self.trainer.policy_version)


async def run(
    steps: Sequence[TrajectoryGroup], directory, *, trainer=None, publisher=None, on_step=None, **options
) -> list[dict]:
    """Train on these groups, one item per step, and return what was logged."""
    trainer = trainer or make_trainer()
    config = {
        key: options.pop(key) for key in ("max_empty_steps", "max_replacements", "max_staleness") if key in options
    }
    with MetricsWriter(directory) as metrics:
        await train(
            options.pop("source", None) or Steps(steps, trainer),
            trainer=trainer,
            publisher=publisher or Nothing(),
            metrics=metrics,
            config=LoopConfig(num_steps=len(steps), **config),
            observer=Callbacks(on_step=on_step),
            **options,
        )
    return lines(directory)


TIMED_OUT = Counters()
TIMED_OUT.count(Event.STATUS, TrajectoryStatus.TIMEOUT)
GOOD = group(trajectory(1.0), trajectory(0.0))
EQUAL = group(trajectory(1.0), trajectory(1.0))


async def test_i8_a_step_with_all_rows_dropped_is_logged_and_skipped(tmp_path):
    trainer, publisher = make_trainer(), Nothing()
    aborted = group(*[trajectory(None, status=TrajectoryStatus.ABORTED)] * 2)
    steps = [EQUAL, aborted, GOOD]
    logged = await run(steps, tmp_path, trainer=trainer, publisher=publisher, max_empty_steps=None)
    assert [line["train/num_rows"] for line in logged] == [0, 0, 2]
    assert [line["train/policy_version"] for line in logged] == [0, 0, 1]
    assert [line["counters/dropped_rows"] for line in logged] == [2, 2, 0]
    assert logged[0]["counters/dropped_rows/no_variance"] == 2
    assert logged[1]["counters/dropped_rows/aborted"] == 2
    assert publisher.versions == [1]
    assert [step.get("weights/num_bytes") for step in logged] == [None, None, 12]
    assert [step.get("seconds/publish") is not None for step in logged] == [False, False, True]
    assert trainer.policy_version == 1


async def test_i8_a_step_of_pairs_logs_their_scores_and_who_was_left_out(tmp_path):
    steps = [group(trajectory(3.0), trajectory(1.0), trajectory(2.0)), EQUAL]
    first, second = await run(steps, tmp_path, trainer=make_dpo_trainer())
    assert (first["dpo/num_pairs"], first["dpo/score_margin"], first["dpo/accuracy"]) == (1, 2, 0)
    assert first["counters/dropped_rows/not_paired"] == 1
    assert second["counters/dropped_rows/no_variance"] == 2
    assert (second["train/num_rows"], second["dpo/score_margin"]) == (0, None)


async def test_one_failed_rollout_is_dropped_counted_and_told_of(tmp_path, caplog):
    failed = trajectory(None, status=TrajectoryStatus.FAILED)
    (line,) = await run([group(trajectory(1.0), trajectory(0.0), failed)], tmp_path)
    assert "1 of 3 rollouts of step 0 failed, the first with RuntimeError: boom" in caplog.text
    assert line["counters/dropped_rows/failed"] == 1
    assert line["train/num_rows"] == 2


async def test_a_step_whose_rollouts_all_failed_ends_the_training_with_their_error(tmp_path):
    failed = group(*[trajectory(None, status=TrajectoryStatus.FAILED)] * 2)
    with pytest.raises(
        RolloutError, match="all 2 rollouts of step 1 failed, the first with RuntimeError: boom"
    ) as caught:
        await run([GOOD, failed, GOOD], tmp_path)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert len(lines(tmp_path)) == 1


async def test_a_process_whose_rollouts_all_failed_goes_on_while_another_has_good_ones(tmp_path, caplog):
    trainer = make_trainer()
    own = trainer.from_all_processes
    another = {"num_failed": 0, "first_failure": None}
    trainer.from_all_processes = lambda value: (
        [value, replace(value, **another)] if hasattr(value, "first_failure") else own(value)
    )
    failed = group(*[trajectory(None, status=TrajectoryStatus.FAILED)] * 2)
    (line,) = await run([failed], tmp_path, trainer=trainer)
    assert line["train/num_rows"] == 0
    assert "2 of 4 rollouts of step 0 failed" in caplog.text
    another = {"num_failed": 2, "first_failure": "ValueError: bang"}
    with pytest.raises(RolloutError, match="all 4 rollouts of step 0 failed, the first with RuntimeError: boom"):
        await run([failed], tmp_path / "all", trainer=trainer)


LATE = group(*[trajectory(0.0, status=TrajectoryStatus.TIMEOUT, counters=TIMED_OUT)] * 2)
STOPS = "3 steps in a row trained nothing; of the last one, "


class Equal(GroupSource):
    """Groups of equal rewards, one by one."""

    groups_per_step = 2

    async def sample(self, number: int) -> TrajectoryGroup:
        return EQUAL


@pytest.mark.parametrize(
    "options",
    [{}, {"max_replacements": 2.0}, {"max_staleness": 2}, {"make": make_dpo_trainer}],
    ids=["grpo", "dynamic sampling", "staleness", "online dpo"],
)
async def test_a_run_whose_rewards_are_all_equal_stops_after_three_steps_with_a_sentence(tmp_path, caplog, options):
    trainer = options.pop("make", make_trainer)()
    num_groups = 6 if "max_replacements" in options else 2
    reasons = rf"{num_groups} of {num_groups} groups have equal rewards \(the mean is 1\)"
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=1000)
    with pytest.raises(RolloutError, match=STOPS + reasons) as stopped:
        await run([EQUAL] * 9, tmp_path, trainer=trainer, source=Equal(), checkpoints=checkpoints, **options)
    assert f"`unbroken export {tmp_path / 'checkpoints' / 'step-00000003'} MODEL`" in str(stopped.value)
    assert "With loop.max_empty_steps none a run continues" in str(stopped.value)
    assert caplog.text.count("trained nothing") == 3
    assert [line["train/num_rows"] for line in lines(tmp_path)] == [0, 0, 0]
    assert checkpoints.holds(3)


async def test_time_outs_and_failures_are_among_the_reasons(tmp_path):
    failed = trajectory(None, status=TrajectoryStatus.FAILED)
    late = group(*LATE.trajectories, failed)
    reasons = r"1 of 1 groups have equal rewards \(the mean is 0\); 2 of 3 rollouts timed out; 1 of 3 rollouts failed\."
    with pytest.raises(RolloutError, match=STOPS + reasons):
        await run([late] * 3, tmp_path)


async def test_steps_that_teach_nothing_are_counted_in_a_row_and_stop_no_run_that_allows_them(tmp_path):
    await run([EQUAL, EQUAL, GOOD, EQUAL, EQUAL], tmp_path / "in between")
    await run([EQUAL] * 5, tmp_path / "none", max_empty_steps=None)
    with pytest.raises(RolloutError, match="1 steps in a row trained nothing"):
        await run([EQUAL] * 5, tmp_path / "one", max_empty_steps=1)
    with pytest.raises(InvalidInputError, match=r"LoopConfig.max_empty_steps must be >= 1, or None, got 0"):
        LoopConfig(num_steps=1, max_empty_steps=0)


async def test_i8_the_counters_of_all_trajectories_are_logged(tmp_path):
    counters = Counters()
    counters.count(Event.CLOSING, "truncated", 3)
    steps = [group(trajectory(1.0, counters=counters), trajectory(0.0, counters=counters))]
    (line,) = await run(steps, tmp_path)
    assert line["counters/closings/truncated"] == 6
    assert counters.as_dict() == {"closings/truncated": 3}


async def test_on_step_is_told_what_was_logged(tmp_path):
    received = []
    logged = await run(
        [GOOD, EQUAL], tmp_path, on_step=lambda step, metrics: received.append({"step": step, **metrics})
    )
    assert received == logged


async def test_seconds_are_logged_apart(tmp_path):
    (line,) = await run([GOOD], tmp_path)
    assert 0 < line["seconds/collect"] + line["seconds/train"] <= line["seconds/step"]


class Numbered(GroupSource):
    """Groups that differ by their numbers alone."""

    def __init__(self, groups_per_step: int, trainer: Trainer) -> None:
        self.groups_per_step = groups_per_step
        self.trainer = trainer
        self.sampled: list[int] = []
        self.trees: list[weakref.ref] = []
        self.num_alive: list[int] = []
        """Before each group, how many of earlier ones are in memory."""

    async def sample(self, number: int) -> TrajectoryGroup:
        gc.collect()
        self.num_alive.append(sum(tree() is not None for tree in self.trees))
        made = at_version(GOOD, self.trainer.policy_version)
        self.sampled.append(number)
        self.trees.append(weakref.ref(made.trajectories[0].tree))
        return made


async def test_a_steps_groups_are_not_in_memory_while_the_next_are_sampled(tmp_path):
    trainer = make_trainer()
    source = Numbered(1, trainer)
    await run([GOOD] * 3, tmp_path, source=source, trainer=trainer)
    assert source.num_alive == [0, 0, 0]


@pytest.mark.parametrize("groups_per_step", [1, 3, 6])
async def test_a_run_goes_on_with_fewer_or_more_groups_a_step(tmp_path, groups_per_step):
    def checkpoints() -> Checkpoints:
        return Checkpoints(tmp_path / "checkpoints", every=1)

    first, second = make_trainer(), make_trainer()
    await run([GOOD] * 2, tmp_path, source=Numbered(3, first), trainer=first, checkpoints=checkpoints())
    source = Numbered(groups_per_step, second)
    await asyncio.wait_for(run([GOOD] * 4, tmp_path, source=source, trainer=second, checkpoints=checkpoints()), 60)
    assert source.sampled == list(range(6, 6 + 2 * groups_per_step))


async def test_a_bad_reward_ends_the_training_before_any_update(tmp_path):
    trainer = make_trainer()
    with pytest.raises(RewardError, match=r"rewards\[0\] must be finite"):
        await run([group(trajectory(float("nan")), trajectory(0.0))], tmp_path, trainer=trainer)
    assert trainer.policy_version == 0


def test_an_observer_needs_the_engine_after_a_step_only_if_it_does_something_then():
    class Evaluates(RunObserver):
        async def after_step(self, num_steps: int) -> None:
            """Sample."""

    assert [each().needs_engine(1) for each in (RunObserver, Evaluates)] == [False, True]
