"""The problems of each step: every one once, shared out between processes, with seeds that follow from the numbers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from support.fake_renderer import END, VOCAB_SIZE, FakeRenderer, encode
from support.pretend import PretendEngine, PretendTrainer, pretend_to_train
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import InvalidInputError, RewardError, RolloutError, ToolsNotShownError
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import tool
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.collector import Collector, EvaluationSet, Problems, Sampler
from unbroken.runs.config import RolloutConfig
from unbroken.runs.processes import Rank
from unbroken.training.config import LoopConfig
from unbroken.types import SamplingParams


async def reward(messages: Any) -> float:
    return float(messages[0]["content"])


def numbered(number: int) -> ToolEnv:
    return ToolEnv([{"role": "user", "content": str(number)}], [], reward)


def sampler(problems: Problems | None = None, *, seed: int = 0, sampling_seed: int | None = None) -> Sampler:
    return Sampler(
        engine=ScriptedEngine(lambda prompt_ids: [*encode("ok"), END], vocab_size=VOCAB_SIZE),
        renderer=FakeRenderer(),
        config=RolloutConfig(
            problems_per_step=4, group_size=2, sampling=SamplingParams(max_tokens=8, seed=sampling_seed)
        ),
        problems=problems or Problems(env=numbered),
        seed=(seed, 0),
    )


def numbers(groups: list[TrajectoryGroup]) -> list[float | None]:
    return [group.rewards[0] for group in groups]


def seeds(sampler: Sampler) -> list[int | None]:
    assert isinstance(sampler.engine, ScriptedEngine)
    return [request.params.seed for request in sampler.engine.requests]


async def sample_step(collector: Collector, step: int) -> list[TrajectoryGroup]:
    first = step * collector.groups_per_step
    return await asyncio.gather(*map(collector.sample, range(first, first + collector.groups_per_step)))


@tool
def now() -> str:
    """Say the time."""
    return "noon"


def with_tools(number: int) -> ToolEnv:
    return ToolEnv([{"role": "user", "content": str(number)}], [now], reward)


async def test_tools_of_an_environment_that_no_prompt_shows_are_refused_before_anything_is_sampled():
    asked = sampler(Problems(env=with_tools))
    with pytest.raises(ToolsNotShownError, match=r"does not show tools .* without now\."):
        await asked.sample_groups([0, 1], size=3)
    assert isinstance(asked.engine, ScriptedEngine)
    assert asked.engine.requests == []


async def test_tools_that_the_tasks_own_messages_describe_are_taken():
    asked = sampler(Problems(env=with_tools))
    (group,) = await replace(asked, config=replace(asked.config, tools_in_messages=True)).sample_groups([3], size=2)
    assert group.rewards == (3.0, 3.0)


async def test_steps_take_the_problems_in_order():
    assert [numbers(await sample_step(Collector(sampler()), step)) for step in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("num_processes", [2, 3, 4])
async def test_processes_share_out_what_one_alone_would_take(num_processes):
    processes = [Collector(sampler(), rank=Rank(index=k, num_processes=num_processes)) for k in range(num_processes)]
    for step in range(2):
        parts = [numbers(await sample_step(collector, step)) for collector in processes]
        assert all(parts)
        assert sorted(number for part in parts for number in part) == [4 * step + k for k in range(4)]


async def test_what_is_sampled_follows_from_the_seed_and_the_number():
    first, again, other, alone = sampler(), sampler(), sampler(seed=1), sampler()
    for run in (first, again, other):
        await sample_step(Collector(run), 0)
    await alone.sample_group(3, size=2)
    assert seeds(first) == seeds(again)
    assert len(set(seeds(first))) == 8
    assert not set(seeds(first)) & set(seeds(other))
    assert set(seeds(alone)) < set(seeds(first))


async def test_a_sampling_seed_of_the_users_changes_what_is_sampled():
    own, without = sampler(sampling_seed=7), sampler()
    for run in (own, without):
        await run.sample_group(0, size=2)
    assert not set(seeds(own)) & set(seeds(without))


def test_a_step_needs_a_problem_for_each_process():
    with pytest.raises(InvalidInputError, match="problems_per_step must be at least the number of processes, 5, got 4"):
        Collector(sampler(), rank=Rank(index=0, num_processes=5))


async def make_steps(problems: Problems) -> None:
    """Make two steps of a trainer that only takes the groups."""
    config = LoopConfig(num_steps=2, max_empty_steps=None)
    await pretend_to_train(
        Collector(sampler(problems)), PretendEngine(lambda version: 0), PretendTrainer(lambda step: 0), config
    )


async def test_a_group_has_its_row_of_the_data_set_also_if_its_score_makes_a_new_group():
    async def score(number: int, group: TrajectoryGroup) -> TrajectoryGroup:
        return TrajectoryGroup(group_id=group.group_id, trajectories=group.trajectories)

    problems = Problems(env=numbered, score=score, row=lambda number: {"index": number})
    assert (await sampler(problems).sample_group(3, size=2)).data == {"index": 3}


async def test_a_group_keeps_its_row_as_it_was_when_it_was_sampled():
    """Its file is written beside the update and the next step's sampling, whose environments may change the row."""
    row = {"seen": [1]}
    group = await sampler(Problems(env=numbered, row=lambda number: row)).sample_group(3, size=2)
    row["seen"].append(2)
    assert group.data == {"seen": [1]}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_the_name_of_an_evaluation_set_is_that_of_a_folder(name):
    with pytest.raises(InvalidInputError, match="name must be that of an evaluation set, and of a folder"):
        EvaluationSet(name=name, problems=Problems(env=numbered))


async def test_a_reward_that_is_wrong_ends_the_step_with_its_own_error():
    async def score(number: int, group: TrajectoryGroup) -> TrajectoryGroup:
        raise RewardError(f"problem {number}")

    with pytest.raises(RewardError, match="problem 0"):
        await make_steps(Problems(env=numbered, score=score))


async def test_a_score_that_cancels_itself_is_an_error_and_no_group_is_left_out() -> None:
    """A task group takes no notice of a task that ends as cancelled."""

    async def score(number: int, group: TrajectoryGroup) -> TrajectoryGroup:
        if number == 2:
            raise asyncio.CancelledError
        return group

    problems = Problems(env=numbered, score=score)
    with pytest.raises(RolloutError, match="cancelled, and not by the run"):
        await make_steps(problems)
    with pytest.raises(RolloutError, match="cancelled, and not by the run"):
        await sampler(problems).sample_groups(range(4), size=2)


async def test_a_cancelled_step_is_cancelled_and_no_error() -> None:
    begun = asyncio.Event()

    async def score(number: int, group: TrajectoryGroup) -> TrajectoryGroup:
        begun.set()
        await asyncio.sleep(60)
        return group

    step = asyncio.create_task(make_steps(Problems(env=numbered, score=score)))
    await begun.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
