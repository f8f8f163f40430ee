"""A source, an engine's version and a trainer for the loop, whose clock is the turns of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from support.rows import trajectory
from unbroken.errors import EngineError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.groups import TakenGroups
from unbroken.training.observer import EventKind, LoopEvent
from unbroken.types import FinishReason, SampledSequence, VersionSpan, token_ids


async def wait_turns(turns: int) -> None:
    """Wait this many turns of the event loop."""
    for _ in range(turns):
        await asyncio.sleep(0)


def has_variance(group: TrajectoryGroup) -> bool:
    """Whether the rewards of a group differ."""
    return len({member.reward for member in group.trajectories}) > 1


@dataclass
class TurnEngine:
    """An engine that is its version, and whether it is there."""

    policy_version: int = 0
    is_away: bool = False


@dataclass
class TurnSource:
    """Groups of two rollouts with an id at each end of their time; `turns` says how long a number takes."""

    engine: TurnEngine
    turns: Callable[[int, int], int]
    """From a number, and how often it was sampled before, to turns of the loop."""
    groups_per_step: int
    rewards: Callable[[int], tuple[float, float]] = lambda number: (0.0, 1.0)
    num_starts: dict[int, int] = field(default_factory=dict)
    num_running: int = 0
    max_running: int = 0

    async def sample(self, number: int) -> TrajectoryGroup:
        """See `GroupSource`."""
        num_before = self.num_starts.get(number, 0)
        self.num_starts[number] = num_before + 1
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            versions = [self.engine.policy_version]
            for _ in range(self.turns(number, num_before)):
                await asyncio.sleep(0)
                if self.engine.is_away:
                    raise EngineError("the engine is away")
            versions.append(self.engine.policy_version)
        finally:
            self.num_running -= 1
        members = tuple(trajectory(reward, completion=_sequence(versions)) for reward in self.rewards(number))
        return TrajectoryGroup(group_id=str(number), trajectories=members)


@dataclass
class TurnMaker:
    """A trainer whose step takes `step_turns`, and a publisher that takes `publish_turns`."""

    engine: TurnEngine
    step_turns: Callable[[int], int] = lambda step: 3
    publish_turns: Callable[[int], int] = lambda version: 1
    policy_version: int = 0
    taken: list[TakenGroups] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    """Of the oldest id of each group."""
    states: list[Mapping[str, Any]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    num_recoveries: int = 0
    trains: Callable[[int], bool] = lambda step: True

    async def agree(self, *, is_lost: bool, failure: Exception | None) -> bool:
        """See `StepMaker`."""
        await asyncio.sleep(0)
        if failure is not None:
            raise failure
        return is_lost

    async def recover(self, lost: EngineError | None) -> None:
        """See `StepMaker`."""
        self.num_recoveries += 1
        await wait_turns(3)
        self.engine.is_away = False
        self.engine.policy_version = self.policy_version

    async def find_loss(self, groups: Any, *, oldest_version: int) -> EngineError | None:
        """See `StepMaker`."""
        return None

    async def is_outage(self, error: EngineError) -> bool:
        """See `StepMaker`."""
        return True

    async def make_step(self, taken: TakenGroups) -> None:
        """See `StepMaker`."""
        self.taken.append(taken)
        for group in taken.groups:
            versions = [int(node.policy_versions.min()) for t in group.trajectories for node in t.tree.nodes[1:]]
            self.staleness.append(self.policy_version - min(versions))
        await wait_turns(self.step_turns(taken.step))
        self.states.append(taken.numbers)
        self.policy_version += self.trains(taken.step)

    def around_step(self, step: int) -> AbstractContextManager[None]:
        """See `StepMaker`."""
        return nullcontext()

    async def publish_now(self) -> None:
        """See `StepMaker`."""
        await self.publish(None, policy_version=self.policy_version)

    async def snapshot(self) -> Any:
        """See `StepMaker`."""
        await asyncio.sleep(0)

    async def publish(self, snapshot: Any, *, policy_version: int) -> bool:
        """See `StepMaker`."""
        await wait_turns(self.publish_turns(policy_version))
        if self.engine.is_away:
            raise EngineError("the engine is away")
        self.engine.policy_version = policy_version
        return True

    def needs_engine(self, step: int) -> bool:
        """See `StepMaker`."""
        return False

    async def end_step(self, step: int) -> None:
        """See `StepMaker`."""
        self.ended.append(step)

    @property
    def replaced(self) -> list[int]:
        """The numbers of the groups that were replaced."""
        return [int(group.group_id) for taken in self.taken for group in taken.replaced]

    @property
    def trained(self) -> list[int]:
        """The numbers of the groups that were trained, in their order."""
        return [int(group.group_id) for taken in self.taken for group in taken.groups]


@dataclass
class Seen:
    """Keeps all events."""

    events: list[LoopEvent] = field(default_factory=list)

    def observe(self, event: LoopEvent) -> None:
        """See one event."""
        self.events.append(event)

    def count(self, kind: EventKind) -> int:
        """How many events of a kind there were."""
        return sum(event.kind is kind for event in self.events)


def _sequence(versions: list[int]) -> SampledSequence:
    spans = [VersionSpan(start=at, stop=at + 1, policy_version=version) for at, version in enumerate(versions)]
    return SampledSequence(
        completion_ids=token_ids(np.array([5, 9])),
        rollout_logprobs=np.array([-0.5, -0.5], dtype=np.float32),
        finish_reason=FinishReason.STOP,
        version_spans=tuple(spans),
    )
