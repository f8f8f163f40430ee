"""The tasks of bench/overlap.py, as a `GroupSource`, and an engine that only takes the time that sampling would."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unbroken.engines.base import Engine
from unbroken.engines.scripted import ScriptedEngine
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.training.groups import GroupSource
from unbroken.types import FinishReason, SampledSequence, SampleRequest, SampleResult, SamplingParams, VersionSpan
from words_env import Words

_SLICE = 8
"""Ids that the timed engine samples between two looks at its version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Rollouts of `num_turns` turns, with a call of a tool between two. Lengths are lognormal, for a random model would
    sample to the end of any limit.
    """

    name: str
    num_turns: int
    median: int
    """Ids of a turn."""
    sigma: float
    """Of the logarithm of a turn's ids: 1 is a tail with a 95th percentile of five medians."""
    max_ids: int
    tool_s: tuple[float, float] = (0.0, 0.0)
    """A call takes a time between these."""

    def scaled(self, factor: float) -> Task:
        """The task with lengths times `factor`."""
        return replace(self, median=max(1, int(self.median * factor)), max_ids=max(2, int(self.max_ids * factor)))


TASKS = {
    "one_turn": Task(name="one_turn", num_turns=1, median=200, sigma=1.0, max_ids=1536),
    "four_turns": Task(name="four_turns", num_turns=4, median=80, sigma=0.6, max_ids=320, tool_s=(0.02, 0.2)),
}


class LimitedEngine:
    """An engine whose requests end after lengths that are drawn for them."""

    def __init__(self, engine: Engine, task: Task, rng: np.random.Generator) -> None:
        self._engine = engine
        self._task = task
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample as many ids as the turn shall have."""
        length = int(np.clip(self._rng.lognormal(np.log(self._task.median), self._task.sigma), 4, self._task.max_ids))
        params = replace(request.params, max_tokens=min(length, request.params.max_tokens))
        return await self._engine.sample(replace(request, params=params))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder:
    """A group of a task."""

    task: Task
    number: int
    """Lengths and times of calls follow from it."""
    size: int
    seed: int


async def sample_order(order: TaskOrder, *, engine: Engine, renderer: TemplateRenderer) -> TrajectoryGroup:
    """Sample a group."""
    async with asyncio.TaskGroup() as tasks:
        members = [tasks.create_task(_sample_member(order, k, engine, renderer)) for k in range(order.size)]
    return TrajectoryGroup(group_id=str(order.number), trajectories=tuple(member.result() for member in members))


@dataclass(kw_only=True)
class TaskSource(GroupSource):
    """Groups of a task, one by one or a step at a time."""

    sample_order: Callable[[TaskOrder], Awaitable[TrajectoryGroup]]
    """In this process, or in another."""
    task: Task
    groups_per_step: int
    group_size: int
    seed: int
    next_number: int = 0

    async def __call__(self) -> list[TrajectoryGroup]:
        """Sample the groups of the next step together."""
        numbers = range(self.next_number, self.next_number + self.groups_per_step)
        self.next_number = numbers.stop
        return await asyncio.gather(*(self.sample(number) for number in numbers))

    async def sample(self, number: int) -> TrajectoryGroup:
        """Sample a group."""
        order = TaskOrder(task=self.task, number=number, size=self.group_size, seed=self.seed)
        return await self.sample_order(order)


async def _sample_member(order: TaskOrder, k: int, engine: Engine, renderer: TemplateRenderer) -> Trajectory:
    task, rng = order.task, np.random.default_rng([order.seed, order.number, k])
    return await run_rollout(
        Words(order.number, num_turns=task.num_turns, draw_tool_s=lambda: float(rng.uniform(*task.tool_s))),
        engine=LimitedEngine(engine, task, rng),
        renderer=renderer,
        sampling=SamplingParams(max_tokens=task.max_ids, seed=int(rng.integers(2**31))),
        limits=Limits(max_turns=task.num_turns, timeout_s=300.0),
        trajectory_id=f"{task.name}-{order.seed}-{order.number}-{k}",
    )


class TimedEngine(ScriptedEngine):
    """Takes `first_s` for a prompt and `id_s` for each id, however many requests there are."""

    def __init__(self, *, context_length: int, vocab_size: int, first_s: float, id_s: float) -> None:
        super().__init__(lambda prompt_ids: [], context_length=context_length, vocab_size=vocab_size, allow_forks=True)
        self._first_s = first_s
        self._id_s = id_s

    def set_version(self, policy_version: int) -> None:
        """Have a version without its weights, which say nothing here."""
        self._policy_version = policy_version

    async def sample(self, request: SampleRequest) -> SampleResult:
        """See `Engine`: ids are random."""
        rng = np.random.default_rng(request.params.seed)
        num_ids = min(request.params.max_tokens, self.context_length - len(request.prompt_ids))
        spans: list[VersionSpan] = []
        await asyncio.sleep(self._first_s)
        for start in range(0, num_ids, _SLICE):
            stop = min(start + _SLICE, num_ids)
            spans.append(VersionSpan(start=start, stop=stop, policy_version=self.policy_version))
            await asyncio.sleep(self._id_s * (stop - start))
        ids = rng.integers(self.vocab_size // 2, self.vocab_size, num_ids).astype(np.int32)
        sequence = SampledSequence(
            completion_ids=ids,
            rollout_logprobs=np.full(num_ids, -np.log(self.vocab_size), dtype=np.float32),
            finish_reason=FinishReason.LENGTH,
            version_spans=_join(spans),
        )
        return SampleResult(prompt_ids=request.prompt_ids, sequences=(sequence,))


def _join(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].policy_version == span.policy_version:
            joined[-1] = replace(joined[-1], stop=span.stop)
        else:
            joined.append(span)
    return tuple(joined)
