"""What a run sees of its steps, and does around them.

groups ──► before_update ──► on_rollouts ──► updates ──► publish ──► on_step ──► after_step      around_step: all of it
                                             └► settle, before a checkpoint and after the last step
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from unbroken.counters import Counters
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.metrics.writer import Metrics
from unbroken.training.model.row_scores import RowScores
from unbroken.types import TrainingSample

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """What a process collected for one step, and what it trains on."""

    step: int
    """From 0."""
    groups: Sequence[TrajectoryGroup]
    units: Sequence[Any]
    """The objective's; `trainer.objective.get_rows` has their rows."""
    counters: Counters
    """Of this process's rollouts and dropped rows."""
    is_trained: bool
    """Whether a process has anything to train on. If so, the trainer may use the engine's memory."""
    score: Callable[[Sequence[TrainingSample]], list[RowScores]]
    """`Trainer.score`, which every process calls: in the same passes it scores rows that the step needs scored
    anyway."""


class RunObserver:
    """What a run adds to the loop, in each of its processes: a subclass overrides what it needs, the rest does nothing.

    The coroutines may wait for the other processes, and must fail in all of them or in none.
    """

    before_update: Callable[[], Awaitable[None]] | None = None
    """Called when a step's groups are sampled and there is something to train on: `SleepingEngine.sleep`, by which an
    engine of this process lends the trainer its memory until it gets the new weights. If the step fails, it stays
    asleep: the weights may be between two versions."""

    def around_step(self, step: int) -> AbstractContextManager[None]:
        """A block in which the step is made, from its first rollout to `after_step`; for profilers."""
        return nullcontext()

    async def on_resume(self) -> None:
        """See that a run continues: the engines have the trainer's weights again, and nothing was sampled yet.

        After an `OutageError` it is called again, once the engine is back.
        """

    async def on_rollouts(self, rollouts: StepRollouts) -> None:
        """See a step's rollouts before they are trained on."""

    async def settle(self) -> None:
        """Finish what runs beside the steps, before a checkpoint of them is written and after the last one."""

    def on_step(self, step: int, metrics: Metrics) -> None:
        """See the metrics of a step, numbered from 0, once they are written."""

    def warn(self, words: str) -> None:
        """Say that a step lost something: rollouts that failed, or all that it could have trained on. In the first
        process, at each such step; by default a warning in the log.
        """
        _logger.warning("%s", words)

    async def after_step(self, num_steps: int) -> None:
        """Do what comes after a step, with the number of steps made; on resume, again for the last one.

        After an `OutageError` it is called again, once the engine is back.
        """

    def needs_engine(self, num_steps: int) -> bool:
        """Whether `after_step` samples after this number of steps. With `max_staleness` it then waits until the weights
        are published.
        """
        return type(self).after_step is not RunObserver.after_step
