"""Evaluations during training with staleness: among the rollouts, on the training's own engine.

    step N ── candidate written ── begin ─────────────────────────────────► settled after the step that is made then
                                     └── sample, while the next steps are trained ──┘

It begins once the step's weights are published, and later ones sample the rest: the line says the oldest and the newest
version.

Only sampling runs during the steps. Processes meet after a step, where they all do: once each has sampled its part, the
line is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from unbroken.errors import OutageError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.evaluation.evaluator import Evaluator
from unbroken.runs.evaluation.schedule import Evaluations
from unbroken.timeline import Track
from unbroken.training.config import OutageConfig
from unbroken.training.trainer import Trainer
from unbroken.training.waits import fail_together, in_any_process, log_waiting

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    num_steps: int
    task: asyncio.Task[list[list[TrajectoryGroup]]]


class BackgroundEvaluations:
    """One evaluation at a time; each process calls all methods together, but for `is_due`."""

    def __init__(
        self,
        evaluations: Evaluations,
        trainer: Trainer,
        *,
        last: int,
        outages: OutageConfig | None = None,
    ) -> None:
        """The evaluation after the step `last` is not one of these."""
        self._evaluations = evaluations
        self._evaluators = [each for each in evaluations.evaluators if each.num_problems > 0]
        self._trainer = trainer
        self._last = last
        self._outages = outages or OutageConfig()
        self._running: _Running | None = None
        self._newest = self._find_newest()
        """After how many steps the newest one began that was recorded, is running, or was given up."""
        self._losses: tuple[int, int] = (0, 0)
        """The one that was lost last, by the number of steps after which it was due, and how often it was."""

    def is_due(self, num_steps: int) -> bool:
        """Whether to begin one after this number of steps; also if one is missing that a killed run did not end."""
        if self._evaluations.config.every == 0 or num_steps >= self._last or not self._evaluators:
            return False
        return self._find_due(num_steps) > self._newest

    async def after_step(self, num_steps: int) -> None:
        """Record the one that is running once all processes have sampled it; begin the next if it is due.

        The engine has the step's weights if one is due. Raises as `Evaluator.record` does.
        """
        if self.is_due(num_steps):
            await self.finish()
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

    async def close(self) -> None:
        """Cancel what is running, in this process alone."""
        if self._running is not None:
            self._running.task.cancel()
            await asyncio.gather(self._running.task, return_exceptions=True)

    async def _begin(self, num_steps: int) -> None:
        await asyncio.to_thread(self._evaluations.models.write_candidate, num_steps)
        self._newest = num_steps
        self._running = _Running(num_steps=num_steps, task=asyncio.create_task(self._sample(num_steps)))

    async def _sample(self, num_steps: int) -> list[list[TrajectoryGroup]]:
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
            await self._lose(running, lost or OutageError("another process lost its engine"))
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

    def _find_due(self, num_steps: int) -> int:
        """The newest step up to `num_steps` after which an evaluation is due."""
        every = self._evaluations.config.every
        return num_steps // every * every

    def _find_newest(self) -> int:
        return min((each.find_last_step() for each in self._evaluators), default=0)
