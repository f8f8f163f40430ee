"""The groups of one process: what samples them, and which of their numbers are trained.

A checkpoint holds what was *trained* (or replaced: that is done, too), not what was sampled:

    trained 0 1 2 4, in flight 3 5, finished 6        state: next 3, beyond it 4
    after a kill 3 is sampled next, then 5, 6, 7
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from unbroken.errors import CheckpointError
from unbroken.rollout.trajectory import TrajectoryGroup


class GroupSource(ABC):
    """Samples the groups of one process, numbered 0, 1, 2, ... without end; each is trained once.

    A subclass has `groups_per_step` and `sample`. One whose groups depend on more than their numbers, on the results so
    far as with a curriculum or on a generator, has the other methods too.

    Several are sampled at the same time, and not always in their order. A number whose group was dropped or lost, or
    was in flight when the run was killed, is asked for again: it stands for the same problem.
    """

    groups_per_step: int
    """Number of this process's groups in a step, at least 1."""

    @abstractmethod
    async def sample(self, number: int) -> TrajectoryGroup:
        """Sample the group with this number, with the weights that the engine then has.

        A call that is cancelled aborts its requests and closes its environments.
        """

    def record(self, number: int, group: TrajectoryGroup) -> None:  # noqa: B027  # most sources need it not
        """Take note that a number's group is trained or replaced. Called once for each number, also over kills."""

    def choices(self) -> Mapping[str, Any] | None:
        """The problems of numbers that were not recorded yet, and its own state, in types that JSON can hold.

        They are in checkpoints: after a kill, what was in flight is sampled again, of the same problem. None if this
        source does not choose.
        """
        return None

    def restore_choices(self, choices: Mapping[str, Any], /) -> None:
        """Continue from what `choices` returned.

        Raises:
            CheckpointError: this source does not choose.
        """
        raise CheckpointError("the run began with a curriculum and cannot continue without: give it the same")


class GroupNumbers:
    """The numbers of a run's groups, each of which is trained once; and for each that is replaced, one more."""

    def __init__(self, groups_per_step: int, *, num_steps: int, num_made: int, state: Mapping[str, Any] | None) -> None:
        """The numbers of so many steps, of which `num_made` are made.

        `state` is that of the checkpoint, and what it does not call trained is given out again; without one, the lowest
        numbers were trained in their order. The steps that are left have `groups_per_step`, however many those before
        had.
        """
        state = state or {"next": num_made * groups_per_step, "beyond": [], "num_replaced": 0}
        self._lowest: int = state["next"]
        """All numbers below are trained."""
        self._beyond = set(state["beyond"])
        """The others that are trained."""
        self._num_replaced: int = state["num_replaced"]
        self._fresh: int = max((number + 1 for number in self._beyond), default=self._lowest)
        """The lowest number that was never given out."""
        self._again = [number for number in range(self._lowest, self._fresh) if number not in self._beyond]
        """A heap of numbers to give out again."""
        num_trained = self._lowest + len(self._beyond) - self._num_replaced
        self._num_to_train = num_trained + (num_steps - num_made) * groups_per_step

    @property
    def has_next(self) -> bool:
        """Whether there is a number to give out."""
        return bool(self._again) or self._fresh < self._num_to_train + self._num_replaced

    def take_next(self) -> int:
        """Give out the lowest number that is neither trained nor given out; there must be one (`has_next`)."""
        if self._again:
            return heapq.heappop(self._again)
        self._fresh += 1
        return self._fresh - 1

    def put_back(self, number: int) -> None:
        """Give the number out again, before higher ones."""
        heapq.heappush(self._again, number)

    def mark_trained(self, numbers: Iterable[int]) -> None:
        """These are trained, and never given out again."""
        self._beyond.update(numbers)
        while self._lowest in self._beyond:
            self._beyond.remove(self._lowest)
            self._lowest += 1

    def mark_replaced(self, number: int) -> None:
        """It teaches nothing and is never given out again; there is one more number in its place."""
        self._num_replaced += 1
        self.mark_trained([number])

    def state(self) -> Mapping[str, Any]:
        """What is trained, in types that JSON can hold."""
        return {"next": self._lowest, "beyond": sorted(self._beyond), "num_replaced": self._num_replaced}
