"""A step's groups one by one in the synchronous loop, and others instead of those that teach nothing.

Worked example, 3 groups a step, at most 3 replaced, and numbers that go on where the step before has ended:

    sampled     4: 0 1 1    5: 1 1 1    6: 0 0 1            5 has one reward only
                            7: 0 0 0                        so has 7
                            8: 1 0 1                        trained: 4 6 8; replaced: 5 7; the next step begins with 9

The same numbers are sampled in whatever order they finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.asynchronous.numbers import GroupNumbers
from unbroken.training.asynchronous.source import GroupSource


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledStep:
    """The groups of one step, each kind in the order of their numbers."""

    groups: Sequence[TrajectoryGroup]
    """Those of the step. Some have no variance if no more could be replaced."""
    replaced: Sequence[TrajectoryGroup] = ()


class StepFiller:
    """Collects the groups of one process, step by step. `numbers` say where it stands, also for a checkpoint."""

    def __init__(
        self,
        source: GroupSource,
        numbers: GroupNumbers,
        *,
        has_variance: Callable[[TrajectoryGroup], bool],
        max_replaced: int,
    ) -> None:
        """Replace groups without variance, at most `max_replaced` in a step."""
        self.numbers = numbers
        self._source = source
        self._has_variance = has_variance
        self._max_replaced = max_replaced
        self._before: Mapping[str, Any] | None = None
        """The numbers before the step, which is collected again if its groups are lost."""
        self._groups: dict[int, TrajectoryGroup] = {}
        self._replaced: dict[int, TrajectoryGroup] = {}

    async def collect(self) -> list[TrajectoryGroup]:
        """Sample the next step's groups, and return them with those that were replaced; again for the same step, unless
        `take` was called. The first error cancels all of them.
        """
        if self._before is None:
            self._before = self.numbers.state()
        self.numbers.restore(self._before)
        self._groups, self._replaced = {}, {}
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._source.groups_per_step):
                    tasks.create_task(self._sample_until_it_teaches())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed.exceptions[0].__cause__
        return [*self._groups.values(), *self._replaced.values()]

    def take(self) -> FilledStep:
        """The groups that `collect` has sampled; they are trained from now on."""
        self.numbers.mark_trained(self._groups)
        for number in sorted(self._groups):
            self.numbers.tell(number, self._groups[number])
        self._before = None
        return FilledStep(groups=_in_order(self._groups), replaced=_in_order(self._replaced))

    async def _sample_until_it_teaches(self) -> None:
        while True:
            number = self.numbers.take_next()
            group = await self._source.sample(number)
            if len(self._replaced) >= self._max_replaced or self._has_variance(group):
                self._groups[number] = group
                return
            self._replaced[number] = group
            self.numbers.mark_replaced(number)
            self.numbers.tell(number, group)


def _in_order(groups: Mapping[int, TrajectoryGroup]) -> list[TrajectoryGroup]:
    return [group for _, group in sorted(groups.items())]
