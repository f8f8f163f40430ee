"""Groups and observers for the training loop, out of functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.groups import GroupSource
from unbroken.training.observer import RunObserver, StepRollouts


class EachStep(GroupSource):
    """A `GroupSource` of one group a step, which a function samples by the step's number."""

    groups_per_step = 1

    def __init__(self, sample: Callable[[int], Awaitable[TrajectoryGroup]]) -> None:
        self._sample = sample

    async def sample(self, number: int) -> TrajectoryGroup:
        """See `GroupSource`."""
        return await self._sample(number)


class Callbacks(RunObserver):
    """An observer that calls functions, with the names of its methods."""

    def __init__(
        self,
        *,
        before_update: Callable[[], Awaitable[None]] | None = None,
        on_rollouts: Callable[[StepRollouts], Awaitable[None]] | None = None,
        on_step: Callable[[int, Any], None] | None = None,
        after_step: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self.before_update = before_update
        self._on_rollouts = on_rollouts
        self._on_step = on_step
        self._after_step = after_step

    async def on_rollouts(self, rollouts: StepRollouts) -> None:
        """See `RunObserver`."""
        if self._on_rollouts is not None:
            await self._on_rollouts(rollouts)

    def on_step(self, step: int, metrics: Any) -> None:
        """See `RunObserver`."""
        if self._on_step is not None:
            self._on_step(step, metrics)

    async def after_step(self, num_steps: int) -> None:
        """See `RunObserver`."""
        if self._after_step is not None:
            await self._after_step(num_steps)

    def needs_engine(self, num_steps: int) -> bool:
        """See `RunObserver`."""
        return self._after_step is not None
