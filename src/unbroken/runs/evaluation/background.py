"""Evaluations during training: among the rollouts, on the training's own engine, or on servers of their own.

    step N ── candidate written ── begin ─────────────────────────────────► settled after the step that is made then
                                     └── sample, while the next steps are trained ──┘

On the training's engine it begins once the step's weights are published, and later ones sample the rest: the line says
the oldest and the newest version. Servers of their own get the step's weights first, from a copy, and only these.

Only sampling and publishing run during the steps. Processes meet after a step, where they all do: once each has sampled
its part, the line is written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from unbroken.engines.base import Engine, RequiresVersion
from unbroken.errors import EngineError, OutageError, UnbrokenError
from unbroken.rollout.failures import format_error
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.runs.evaluation.evaluator import Evaluator
from unbroken.runs.evaluation.schedule import Evaluations
from unbroken.timeline import Timeline, Track
from unbroken.training.config import OutageConfig
from unbroken.training.publication import Notices, Snapshot, Snapshots
from unbroken.training.trainer import Trainer
from unbroken.training.waits import fail_together, in_any_process, log_waiting
from unbroken.weights.base import WeightPublisher

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    num_steps: int
    task: asyncio.Task[list[list[TrajectoryGroup]]]


class BackgroundEvaluations:
    """One evaluation at a time; each process calls all methods together, but for `is_due` and `needs_engine`."""

    def __init__(
        self,
        evaluations: Evaluations,
        trainer: Trainer,
        *,
        last: int,
        servers: EvaluationServers | None = None,
        outages: OutageConfig | None = None,
    ) -> None:
        """The evaluation after the step `last` is not one of these. Without `servers` they are the training's."""
        self._evaluations = evaluations
        self._evaluators = [each for each in evaluations.evaluators if each.num_problems > 0]
        self._trainer = trainer
        self._last = last
        self._servers = servers
        self._outages = outages or OutageConfig()
        self._running: _Running | None = None
        self._newest = self._find_newest()
        """After how many steps the newest one began that was recorded, is running, or was given up."""
        self._postponed: int | None = None
        """The one that waits for its servers, by the number of steps after which it was due."""
        self._losses: tuple[int, int] = (0, 0)
        """The one that was lost last, likewise, and how often it was."""

    def is_due(self, num_steps: int) -> bool:
        """Whether to begin one after this number of steps; also if one is missing that a killed run did not end."""
        if self._evaluations.config.every == 0 or num_steps >= self._last or not self._evaluators:
            return False
        return self._find_due(num_steps) > self._newest

    def needs_engine(self, num_steps: int) -> bool:
        """Whether the training's engine must have the weights after this number of steps."""
        return self._servers is None and self.is_due(num_steps)

    async def after_step(self, num_steps: int) -> None:
        """Record the one that is running once all processes have sampled it; begin the next if it is due.

        The engine has the step's weights if `needs_engine`. Raises as `Evaluator.record` does.
        """
        if self.is_due(num_steps):
            await self.finish()
            if not await self._must_wait(num_steps):
                await self._begin(num_steps)
        elif self._running is not None and not await in_any_process(self._trainer, not self._running.task.done()):
            await self._settle(self._running)

    async def finish(self) -> None:
        """Wait for the one that is running, and record it; if its engine went away, it is made again later, if ever."""
        if self._running is None:
            return
        async with log_waiting(f"the evaluation after {self._running.num_steps} steps"):
            await asyncio.wait([self._running.task])
        await self._settle(self._running)

    async def evaluate(self, num_steps: int, when: str) -> tuple[Trajectory, ...]:
        """Evaluate before the first step or after the last, as `Evaluations.evaluate` does.

        Its own servers are waited for (`OutageConfig.wait_s`); if they stay away it is left out, with a warning.
        """
        servers = self._servers
        if servers is None or not self._evaluators or all(each.find(num_steps) for each in self._evaluators):
            return await self._evaluations.evaluate(num_steps, when)
        self._leave_out()
        for _ in range(self._outages.max_losses):
            if await self._wait_for(servers, when) is not None:
                self._evaluations.num_lost += 1
                break
            try:
                if num_steps > 0:
                    await servers.update()
                return await self._evaluations.evaluate(num_steps, when)
            except OutageError as error:
                self._evaluations.num_lost += 1
                _log.warning("the evaluation %s was lost: %s", when, error)
        _log.warning("there is no evaluation %s: its servers stayed away, or lost it too often", when)
        return ()

    async def close(self) -> None:
        """Cancel what is running, in this process alone."""
        if self._running is not None:
            self._running.task.cancel()
            await asyncio.gather(self._running.task, return_exceptions=True)

    async def _begin(self, num_steps: int) -> None:
        version = None if self._servers is None else await self._servers.prepare()
        await asyncio.to_thread(self._evaluations.models.write_candidate, num_steps)
        self._newest, self._postponed = num_steps, None
        self._running = _Running(num_steps=num_steps, task=asyncio.create_task(self._sample(num_steps, version)))

    async def _sample(self, num_steps: int, version: PreparedVersion | None) -> list[list[TrajectoryGroup]]:
        if self._servers is not None and version is not None:
            await self._servers.publish(version)
            del version  # and its copy of the weights
        sampled = []
        for evaluator in self._evaluators:
            span = self._evaluations.timeline.span(
                f"evaluate {evaluator.name}", track=Track.EVALUATION, num_steps=num_steps
            )
            with span:
                sampled.append(await evaluator.sample())
        return sampled

    async def _settle(self, running: _Running) -> None:
        self._running = None
        sampled: Sequence[Sequence[TrajectoryGroup]] = ()
        lost: OutageError | None = None
        async with fail_together(self._trainer):
            try:
                sampled = running.task.result()
            except OutageError as error:
                lost = error
        if await in_any_process(self._trainer, lost is not None):
            await self._lose(running, lost or OutageError("another process lost its servers"))
            return
        try:
            for evaluator, groups in zip(self._evaluators, sampled, strict=True):
                await self._record(running, evaluator, groups)
        except OutageError as error:
            await self._lose(running, error)

    async def _record(self, running: _Running, evaluator: Evaluator, groups: Sequence[TrajectoryGroup]) -> None:
        evaluations, num_steps = self._evaluations, running.num_steps
        evaluation = await evaluator.record(num_steps, groups, num_lost=evaluations.num_lost)
        evaluations.show(evaluator, evaluation, num_steps, f"after {num_steps} steps")
        if evaluations.decides_best(evaluator):
            await asyncio.to_thread(evaluations.models.settle_candidate, evaluation.get_values(), by="reward/mean")

    async def _lose(self, running: _Running, error: OutageError) -> None:
        """Count it. It is made again after a later step or, once that was often enough, given up."""
        due = self._find_due(running.num_steps)
        num_losses = self._losses[1] + 1 if self._losses[0] == due else 1
        self._losses = (due, num_losses)
        self._evaluations.num_lost += 1
        if num_losses < self._outages.max_losses:
            _log.warning("the evaluation after %d steps is made again, later: %s", running.num_steps, error)
            self._newest = self._find_newest()
        else:
            _log.warning("the evaluation after %d steps is given up: %s", running.num_steps, error)
        await asyncio.to_thread(self._evaluations.models.remove_candidate)

    async def _must_wait(self, num_steps: int) -> bool:
        """Whether its own servers are away; it begins after the first step at which they are back."""
        if self._servers is None or (fault := await self._servers.find_fault()) is None:
            return False
        due = self._find_due(num_steps)
        if self._postponed is None:
            _log.warning("the evaluation after %d steps waits for its servers: %s", num_steps, fault)
        elif self._postponed < due:
            self._leave_out()
        self._postponed = due
        return True

    def _leave_out(self) -> None:
        """Give up the one that waits for its servers, if there is one."""
        if self._postponed is not None:
            self._evaluations.num_lost += 1
            _log.warning("the evaluation after %d steps is left out: its servers stayed away", self._postponed)
        self._postponed = None

    async def _wait_for(self, servers: EvaluationServers, when: str) -> str | None:
        """Why no server is there after the longest wait; None once there is one."""
        until_s = time.monotonic() + self._outages.wait_s
        async with log_waiting(f"the servers of the evaluation {when}"):
            while (fault := await servers.find_fault()) is not None:
                if await in_any_process(self._trainer, time.monotonic() >= until_s):
                    return fault
                await asyncio.sleep(self._outages.ask_every_s)
        return None

    def _find_due(self, num_steps: int) -> int:
        """The newest step up to `num_steps` after which an evaluation is due."""
        every = self._evaluations.config.every
        return num_steps // every * every

    def _find_newest(self) -> int:
        return min((each.find_last_step() for each in self._evaluators), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedVersion:
    """A version to evaluate."""

    number: int
    """Of its publication, from 1; the same in all processes."""
    policy_version: int
    weights: Snapshot | None
    """None in processes that publish none."""


class EvaluationServers:
    """Servers of evaluations alone, with the publisher of the first process. Made by `open`.

    Each version to evaluate is published to them, while training continues with the others:

        first process    prepare (a copy of the weights) ── announce(1): publish     in a task during the steps
        the others       prepare ──────────────────────── wait_for(1)                then all sample

    Nothing else is published to them, so all ids of an evaluation have one version.
    """

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
        if publisher is not None:
            snapshots.publishers.append(publisher)
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
