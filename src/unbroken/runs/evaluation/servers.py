"""Servers of evaluations alone: each version to evaluate is published to them, while training goes on elsewhere.

    first process    prepare (a copy of the weights) ── announce(1): publish     in a task beside the steps
    the others       prepare ──────────────────────── wait_for(1)                then all sample

Nothing else is published to them, so all ids of an evaluation have one version.
"""

from __future__ import annotations

from dataclasses import dataclass

from unbroken.engines.base import Engine, RequiresVersion
from unbroken.errors import EngineError, OutageError, UnbrokenError
from unbroken.rollout.failures import format_error
from unbroken.timeline import Timeline, Track
from unbroken.training.agreement import in_any_process
from unbroken.training.asynchronous.notices import Notices
from unbroken.training.snapshots import Snapshot, Snapshots
from unbroken.training.trainer import Trainer
from unbroken.training.waiting import log_waiting
from unbroken.weights.base import WeightPublisher


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedVersion:
    """A version to evaluate."""

    number: int
    """Of its publication, from 1; the same in all processes."""
    policy_version: int
    weights: Snapshot | None
    """None in processes that publish none."""


class EvaluationServers:
    """The servers, with the publisher of the first process. Made by `open`."""

    def __init__(
        self,
        engine: Engine,
        publisher: WeightPublisher | None,
        *,
        trainer: Trainer,
        snapshots: Snapshots,
        notices: Notices,
        timeline: Timeline,
    ) -> None:
        self._engine = engine
        self._publisher = publisher
        self._trainer = trainer
        self._snapshots = snapshots
        self._notices = notices
        self._timeline = timeline
        self._num_published = 0

    @classmethod
    async def open(
        cls,
        engine: Engine,
        publisher: WeightPublisher | None,
        *,
        trainer: Trainer,
        snapshots: Snapshots,
        timeline: Timeline,
    ) -> EvaluationServers:
        """Agree with the other processes on how they learn what was published; all call it together."""
        notices = await Notices.open(trainer)
        return cls(engine, publisher, trainer=trainer, snapshots=snapshots, notices=notices, timeline=timeline)

    async def find_fault(self) -> str | None:
        """Why no server can be used now; None if each process has one. All processes call it together."""
        fault: str | None = None
        try:
            await self._engine.check_health()
        except EngineError as error:
            fault = format_error(error)
        if not await in_any_process(self._trainer, fault is not None):
            return None
        return fault or "another process cannot reach them"

    async def prepare(self) -> PreparedVersion:
        """Copy the trainer's weights, or take the copy that the loop has made. All processes call it together."""
        self._num_published += 1
        return PreparedVersion(
            number=self._num_published,
            policy_version=self._trainer.policy_version,
            weights=await self._snapshots.take(),
        )

    async def publish(self, version: PreparedVersion) -> None:
        """Return once the servers have the version. It waits for no step of another process.

        Raises:
            OutageError: they did not take it.
        """
        if version.policy_version == 0:  # servers start with it
            return
        with self._timeline.span(f"load version {version.policy_version}", track=Track.EVALUATION):
            await self._publish(version)
        if isinstance(self._engine, RequiresVersion):
            self._engine.require_version(version.policy_version)

    async def update(self) -> None:
        """Publish the trainer's weights between two steps, in all processes or in none; raises `OutageError`."""
        lost: OutageError | None = None
        try:
            await self.publish(await self.prepare())
        except OutageError as error:
            lost = error
        self._snapshots.release()
        if await in_any_process(self._trainer, lost is not None):
            raise lost or OutageError("another process could not publish the weights")

    async def _publish(self, version: PreparedVersion) -> None:
        if self._publisher is None or version.weights is None:
            if not await self._notices.wait_for(version.number):
                raise OutageError("another process could not publish the weights: its own log says why")
            return
        waiting = log_waiting(f"policy version {version.policy_version} to be taken for its evaluation")
        try:
            async with self._notices.announce(version.number), waiting:
                await self._publisher.publish(version.weights, policy_version=version.policy_version)
        except UnbrokenError as error:
            raise OutageError(
                f"the servers of the evaluation did not take policy version {version.policy_version}: "
                f"{format_error(error)}"
            ) from error
