"""Lengths, groups after drops, and counts of a step, over all processes; and the list of all metrics."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.fake_renderer import CALL, CALL_END, END, encode
from support.models import tiny_qwen3
from support.resumed_run import make_warm_start
from support.rollouts import MORE, play
from support.rows import group, trajectory
from support.scripted_env import ScriptedEnv
from support.sequences import sampled
from support.steps import train
from unbroken.counters import Counters, Event
from unbroken.engines.scripted import ScriptedEngine, ScriptedReply
from unbroken.errors import PolicyMismatchError
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.trajectory import TrajectoryStatus
from unbroken.runs.prompts.judge import METRICS
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig, TrainerConfig
from unbroken.training.groups import GroupSource
from unbroken.training.metrics.rollouts import RolloutNumbers, rollout_metrics
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.teachers import Teachers, TeacherTask
from unbroken.training.trainer import Trainer
from unbroken.weights.base import WeightUpdate

DOCS = Path(__file__).parents[4] / "docs" / "metrics.md"
FAILED = trajectory(None, status=TrajectoryStatus.FAILED, completion=None)
GROUPS = [
    group(trajectory(0.0, prompt=(5,)), trajectory(4.0, completion=sampled(7, 8, 9, 10)), FAILED),
    group(trajectory(1.0), trajectory(1.0), trajectory(1.0)),
    group(trajectory(9.0), FAILED),
]


def metrics_of(*processes) -> dict:
    joined = RolloutNumbers.merge([RolloutNumbers.of(groups, Counters()) for groups in processes])
    return dict(rollout_metrics(joined, collect_s=2.0))


def test_i8_groups_are_described_as_they_are_after_drops():
    metrics = metrics_of(GROUPS)
    expected = {
        "groups/num": 3,
        "groups/num_compared": 2,
        "groups/num_zero_variance": 1,
        "groups/num_replaced": 0,
        "groups/num_replaced_tokens": 0,
        "groups/size_mean": 2.5,
        "groups/size_min": 2.0,
        "groups/reward_std_mean": 1.0,
    }
    assert {name: metrics[name] for name in expected} == expected  # there may be more


def test_replaced_groups_count_in_all_numbers_but_those_of_the_groups_that_are_kept():
    numbers = RolloutNumbers.of(GROUPS[:1], Counters(), replaced=GROUPS[1:2])
    metrics = rollout_metrics(RolloutNumbers.merge([numbers, numbers]), collect_s=2.0)
    assert metrics["reward/mean"] == pytest.approx(7 / 5)
    assert metrics["groups/kept_reward_mean"] == 2.0
    assert (metrics["groups/num"], metrics["groups/num_zero_variance"]) == (4, 2)
    assert (metrics["groups/num_replaced"], metrics["groups/num_replaced_tokens"]) == (2, 12)


@pytest.mark.parametrize("name", ["kept", "std", "min"])
def test_a_reward_function_or_a_policy_may_have_any_name_and_loses_no_number_to_another_one(name):
    own, other = trajectory(9.0), trajectory(1.0)
    groups = [group(replace(own, reward_parts={name: 8.0}), replace(own, reward_parts={name: 4.0}))]
    numbers = RolloutNumbers.of(groups, Counters(), replaced=[group(other, other)])
    assert rollout_metrics(numbers, collect_s=2.0) == {
        **rollout_metrics(replace(numbers, reward_parts={}), collect_s=2.0),
        f"reward/{name}_mean": 6.0,
    }


def test_equal_rewards_do_not_vary_whatever_their_deviation_rounds_to():
    assert metrics_of([group(*[trajectory(0.1)] * 3)])["groups/num_zero_variance"] == 1
    of_large = metrics_of([group(*map(trajectory, (1e9, 1e9 + 0.25)))])
    assert (of_large["groups/num_zero_variance"], of_large["groups/reward_std_mean"]) == (0, 0.125)


def test_rewards_are_those_of_trajectories_that_can_be_trained_on_and_lengths_those_of_all():
    metrics = metrics_of(GROUPS)
    assert metrics["rollout/num_trajectories"] == 8
    assert metrics["rollout/num_trainable"] == 6
    assert metrics["reward/mean"] == pytest.approx(16 / 6)
    assert metrics["reward/max"] == 9.0
    assert metrics["rollout/prompt_tokens_mean"] == 15 / 8
    assert metrics["rollout/completion_tokens_mean"] == 14 / 8
    assert metrics["rollout/completion_tokens_min"] == 0
    assert metrics["rollout/completion_tokens_max"] == 4
    assert metrics["rollout/num_sampled_tokens"] == 14
    assert metrics["tokens_per_s/generation"] == 7.0


def test_the_numbers_of_two_processes_are_those_of_one_with_all_groups():
    assert metrics_of(GROUPS[:1], GROUPS[1:]) == metrics_of(GROUPS)
    counters = Counters()
    counters.count(Event.FORK, "a", 2)
    numbers = RolloutNumbers.merge([RolloutNumbers.of(GROUPS, counters)] * 2)
    assert rollout_metrics(numbers, collect_s=1.0)["counters/forks/a"] == 4
    assert counters["forks/a"] == 2


def test_statistics_of_nothing_are_none():
    metrics = metrics_of([])
    assert metrics["reward/mean"] is metrics["groups/size_mean"] is metrics["rollout/turns_max"] is None
    assert metrics["rollout/num_trajectories"] == metrics["groups/num"] == 0
    assert metrics_of([group(FAILED)])["reward/mean"] is None


async def test_the_time_in_the_queue_is_a_metric_of_those_rollouts_whose_engine_reports_it():
    async def play_turns(*waits):
        replies = [ScriptedReply(completion_ids=[*encode("hello"), END], queue_s=wait) for wait in waits]
        return await play(ScriptedEnv([MORE] * (len(waits) - 1)), ScriptedEngine(replies))

    known, other = await play_turns(0.5, 0.25), await play_turns(0.25)
    partly, unknown = await play_turns(0.5, None), await play_turns(None)
    assert (known.queue_s, partly.queue_s, unknown.queue_s, FAILED.queue_s) == (0.75, None, None, None)
    metrics = metrics_of([group(known, partly, other, FAILED)], [group(unknown)])
    assert (metrics["seconds/queue_mean"], metrics["seconds/queue_max"]) == (0.5, 0.75)
    metrics = metrics_of([group(unknown)])
    assert metrics["seconds/queue_mean"] is metrics["seconds/queue_max"] is None


async def test_tool_calls_and_turns_are_counted_whether_they_parse_or_not():
    good, broken = ([CALL, *encode(text), CALL_END] for text in ('{"name": "none", "arguments": {}}', "{"))
    engine = ScriptedEngine([[*good, *broken, END], [*encode("so"), END]])
    done = await play(ToolEnv([{"role": "user", "content": "go"}], [], lambda messages: 1.0), engine)
    metrics = metrics_of([group(done)])
    assert metrics["rollout/num_tool_calls"] == 2
    assert metrics["rollout/turns_mean"] == 2


class Nowhere:
    async def publish(self, named_parameters, *, policy_version):
        return WeightUpdate(num_bytes=1, seconds=0.1)


class Source(GroupSource):
    def __init__(self, groups=GROUPS) -> None:
        self.groups = groups
        self.groups_per_step = len(groups)

    async def sample(self, number):
        return replace(self.groups[number % len(self.groups)], group_id=str(number))


async def logged_names(
    directory, *, objective, reference=None, max_staleness=0, teachers=None, warm_start=None
) -> set[str]:
    config = TrainerConfig(teacher_weight=None if teachers is None else 1.0)
    with MetricsWriter(directory) as metrics:
        await train(
            Source(),
            trainer=Trainer(tiny_qwen3(), config, objective=objective, reference=reference, teachers=teachers),
            publisher=Nowhere(),
            metrics=metrics,
            checkpoints=Checkpoints(directory / "checkpoints"),
            config=LoopConfig(num_steps=1, max_staleness=max_staleness),
            warm_start=warm_start,
        )
    (line,) = (directory / "metrics.jsonl").read_text().splitlines()
    return set(json.loads(line)) - {"step"}


async def test_every_metric_of_a_run_is_in_the_list_and_the_list_has_no_others(tmp_path):
    names = await logged_names(tmp_path / "grpo", objective=PolicyGradient())
    names |= await logged_names(tmp_path / "asynchronous", objective=PolicyGradient(), max_staleness=1)
    warm_start = replace(make_warm_start(1), weight=0.0)
    names |= await logged_names(tmp_path / "supervised", objective=PolicyGradient(), warm_start=warm_start)
    names |= await logged_names(tmp_path / "dpo", objective=OnlineDpo(), reference=tiny_qwen3(seed=1))
    names |= {*METRICS}  # of a judge
    teachers = {name: tiny_qwen3(seed=1) for name in ("first", "second")}
    chosen = Teachers(models=teachers, choose=lambda _: TeacherTask(teacher="first"), top_k=2)
    names |= await logged_names(tmp_path / "teachers", objective=PolicyGradient(), teachers=chosen)
    reasons = {name for name in names if name.count("/") == 2}
    rows = [line.split("|")[1] for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    listed = [name for cell in rows for name in re.findall(r"`([^`]+)`", cell)]
    assert len(listed) == len(set(listed))
    assert names - reasons == set(listed)
    assert {name.rpartition("/")[0] for name in reasons} <= set(listed)


async def test_kl_is_of_everything_sampled_by_the_ids_that_each_part_has(tmp_path):
    """Two groups vary; the third, of three trajectories with one reward, is scored and weighs in."""

    async def run(directory, num_scored: int) -> dict:
        groups = [group(trajectory(1.0), trajectory(0.0)), GROUPS[1], group(trajectory(2.0), trajectory(3.0))]
        with MetricsWriter(directory) as metrics:
            await train(
                Source(groups),
                trainer=Trainer(tiny_qwen3(), TrainerConfig()),
                publisher=Nowhere(),
                metrics=metrics,
                config=LoopConfig(num_steps=1, num_zero_variance_scored=num_scored),
            )
        (line,) = (directory / "metrics.jsonl").read_text().splitlines()
        return json.loads(line)

    scored, unscored = await run(tmp_path / "scored", 3), await run(tmp_path / "unscored", 0)
    assert scored["mismatch/num_tokens"] == 8
    assert scored["mismatch/num_zero_variance_tokens"] == unscored["mismatch/num_zero_variance_tokens"] == 6
    # All trajectories have the same ids and logprobs.
    assert scored["mismatch/kl"] == pytest.approx(scored["mismatch/k3"])
    assert scored["mismatch/zero_variance_k3"] == pytest.approx(scored["mismatch/k3"])
    assert scored["mismatch/zero_variance_max_abs"] == pytest.approx(scored["mismatch/max_abs"])
    assert unscored["mismatch/kl"] is unscored["mismatch/zero_variance_k3"] is None
    assert scored["mismatch/k3"] == unscored["mismatch/k3"]


EQUAL = [group(trajectory(1.0), trajectory(1.0)) for _ in range(3)]
"""Rollouts with rewards that teach nothing."""


async def run_untrained(directory, **config: Any) -> dict[str, Any]:
    with MetricsWriter(directory) as metrics:
        await train(
            Source(EQUAL),
            trainer=Trainer(tiny_qwen3(), TrainerConfig(**config)),
            publisher=Nowhere(),
            metrics=metrics,
            config=LoopConfig(num_steps=1),
        )
    (line,) = (directory / "metrics.jsonl").read_text().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


async def test_i9_a_step_that_trains_nothing_compares_its_rollouts_too(tmp_path):
    metrics = await run_untrained(tmp_path)
    assert metrics["train/num_rows"] == 0
    assert metrics["mismatch/num_tokens"] == 12
    assert metrics["mismatch/k3"] == metrics["mismatch/kl"] > 0
    assert metrics["mismatch/max_abs"] > 0


async def test_i9_and_ends_the_run_if_they_are_of_another_policy(tmp_path):
    """Garbage earns no reward: without this no step would be trained, and nothing compared."""
    with pytest.raises(PolicyMismatchError, match=r"two policies \(I9\)"):
        await run_untrained(tmp_path, max_policy_k3=1e-6)


def test_what_a_reward_is_made_of_is_shown_by_name():
    parts = [{"correct": 1.0, "short": 0.5}, {"correct": 0.0, "short": 0.25}, {"correct": 1.0}]
    members = [replace(trajectory(1.0), reward_parts=each) for each in parts]
    metrics = metrics_of([group(*members[:2])], [group(members[2], FAILED)])
    assert metrics["reward/correct_mean"] == pytest.approx(2 / 3)
    assert metrics["reward/short_mean"] == pytest.approx(0.375)
