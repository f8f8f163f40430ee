"""A trainer that only takes time, and keeps what a run would log."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unbroken.errors import EngineError
from unbroken.ledger.nodes import Origin
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.simulation.config import TrainerTimes
from unbroken.simulation.engine import SimulatedEngine
from unbroken.timeline import Timeline
from unbroken.training.asynchronous.idle import IdleTimes
from unbroken.training.asynchronous.maker import TakenGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A step that was made."""

    begun_s: float
    """When its groups were taken."""
    ended_s: float
    num_groups: int
    ids_by_staleness: Mapping[int, int]
    """Sampled ids for each number of policy versions between the one that sampled them and the trainer's."""
    num_given_up: int
    """Groups that were cancelled or dropped since the step before."""
    num_ids_given_up: int
    idle: Mapping[str, float | None]
    """As in a run's metrics."""

    @property
    def num_ids(self) -> int:
        """Sampled ids that were trained."""
        return sum(self.ids_by_staleness.values())


@dataclass(slots=True, kw_only=True)
class SimulatedTrainer:
    """A `StepMaker` of one process."""

    times: TrainerTimes
    engine: SimulatedEngine
    idle: IdleTimes
    """Sees the loop's events."""
    timeline: Timeline
    is_serial: bool
    """Whether nothing is sampled from a step's begin to its end, and weights are published without a copy."""
    may_sample: asyncio.Event
    policy_version: int = 0
    steps: list[SimulatedStep] = field(default_factory=list)
    _taken: TakenGroups | None = None
    _begun_s: float = 0.0
    _ids_by_staleness: Mapping[int, int] = field(default_factory=dict)
    _idle: Mapping[str, float | None] = field(default_factory=dict)

    async def agree(self, *, is_lost: bool, failure: Exception | None) -> bool:
        """See `StepMaker`."""
        if failure is not None:
            raise failure
        return is_lost

    async def recover(self, lost: EngineError | None) -> None:
        """See `StepMaker`: a simulated engine is never lost."""

    async def find_loss(self, groups: Sequence[TrajectoryGroup], *, oldest_version: int) -> EngineError | None:
        """See `StepMaker`."""
        return None

    async def is_outage(self, error: EngineError) -> bool:
        """See `StepMaker`."""
        return False

    async def make_step(self, taken: TakenGroups) -> None:
        """See `StepMaker`."""
        if self.is_serial:
            self.may_sample.clear()
        self._taken, self._begun_s = taken, _now_s()
        self._idle = self.idle.take_metrics(self._begun_s)
        self._ids_by_staleness = count_staleness(taken.groups, self.policy_version)
        with self.timeline.span("train"):
            await asyncio.sleep(self.times.step_s + self.times.id_s * _count_ids(taken.groups))
        self.policy_version += 1
        if (taken.step + 1) % self.times.save_every == 0:
            with self.timeline.span("checkpoint"):
                await asyncio.sleep(self.times.save_s)

    async def snapshot(self) -> Any:
        """See `StepMaker`."""
        if not self.is_serial:
            with self.timeline.span("snapshot"):
                await asyncio.sleep(self.times.snapshot_s)

    async def publish(self, snapshot: Any, *, policy_version: int) -> bool:
        """See `StepMaker`: the engine goes on until the weights have arrived."""
        await asyncio.sleep(max(0.0, self.times.publish_s - self.engine.update_s))
        await self.engine.update(policy_version)
        return True

    def needs_engine(self, step: int) -> bool:
        """See `StepMaker`."""
        return self.times.evaluation_every > 0 and (step + 1) % self.times.evaluation_every == 0

    async def end_step(self, step: int) -> None:
        """See `StepMaker`."""
        assert self._taken is not None, "make_step is called first"
        counts = self._taken.counts
        if self.is_serial and self.needs_engine(step):  # otherwise it runs beside the steps
            with self.timeline.span("evaluation"):
                await asyncio.sleep(self.times.evaluation_s)
        await asyncio.sleep(self.times.end_s)
        self.may_sample.set()
        self.steps.append(
            SimulatedStep(
                begun_s=self._begun_s,
                ended_s=_now_s(),
                num_groups=len(self._taken.groups),
                ids_by_staleness=self._ids_by_staleness,
                num_given_up=counts.num_cancelled + counts.num_dropped,
                num_ids_given_up=counts.num_cancelled_ids + counts.num_dropped_ids,
                idle=self._idle,
            )
        )


def count_staleness(groups: Sequence[TrajectoryGroup], policy_version: int) -> Mapping[int, int]:
    """Sampled ids for each number of versions between theirs and `policy_version`."""
    counts: Counter[int] = Counter()
    for node in _nodes(groups):
        if node.origin is Origin.SAMPLED:
            versions, num_ids = np.unique(node.policy_versions, return_counts=True)
            counts.update(dict(zip((policy_version - versions).tolist(), num_ids.tolist(), strict=True)))
    return counts


def _count_ids(groups: Sequence[TrajectoryGroup]) -> int:
    return sum(len(node.token_ids) for node in _nodes(groups))


def _nodes(groups: Sequence[TrajectoryGroup]) -> list[Any]:
    return [node for group in groups for member in group.trajectories for node in member.tree.nodes]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
