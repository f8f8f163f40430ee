"""Evaluations beside training: their requests run among the rollouts, on the training's own engine.

    step N ── weights published ── candidate written ── begin ──────────────► settled after the step that is made then
                                                         └── sample, while the next steps are trained ──┘

Only sampling runs beside the steps. Processes meet after a step, where they all do: once each has sampled its part, the
line is written. An id has the version that sampled it, and the line says the oldest and the newest of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from unbroken.errors import OutageError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.evaluation.schedule import Evaluations
from unbroken.training.agreement import fail_together, in_any_process
from unbroken.training.trainer import Trainer
from unbroken.training.waiting import log_waiting

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    num_steps: int
    task: asyncio.Task[list[list[TrajectoryGroup]]]


class EvaluationsBeside:
    """One evaluation at a time; each process calls all methods together, but for `is_due`."""

    def __init__(self, evaluations: Evaluations, trainer: Trainer, *, last: int) -> None:
        """The evaluation after the step `last` is not one of these."""
        self._evaluations = evaluations
        self._evaluators = [each for each in evaluations.evaluators if each.num_problems > 0]
        self._trainer = trainer
        self._last = last
        self._running: _Running | None = None
        self._newest = min((each.find_last_step() for each in self._evaluators), default=0)
        """After how many steps the newest one began that was recorded or is running."""

    def is_due(self, num_steps: int) -> bool:
        """Whether to begin one after this number of steps; also if one is missing that a killed run did not end."""
        every = self._evaluations.config.every
        if every == 0 or num_steps >= self._last or not self._evaluators:
            return False
        return num_steps // every * every > self._newest

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
        async with log_waiting(f"the evaluation after step {self._running.num_steps}"):
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
            sampled.append(await evaluator.sample())
        return sampled

    async def _settle(self, running: _Running) -> None:
        self._running = None
        sampled: Sequence[Sequence[TrajectoryGroup]] = ()
        async with fail_together(self._trainer):
            sampled = running.task.result()
        evaluations, models = self._evaluations, self._evaluations.models
        try:
            for evaluator, groups in zip(self._evaluators, sampled, strict=True):
                evaluation = evaluator.record(running.num_steps, groups)
                evaluations.show(evaluator, evaluation, running.num_steps, f"after step {running.num_steps}")
                if evaluations.decides_best(evaluator):
                    await asyncio.to_thread(models.settle_candidate, evaluation.get_values(), by="reward/mean")
        except OutageError as error:
            _log.warning("the evaluation after step %d is made again, later: %s", running.num_steps, error)
            self._newest = min((each.find_last_step() for each in self._evaluators), default=0)
            await asyncio.to_thread(models.remove_candidate)
