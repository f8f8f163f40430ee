"""Which groups of a process are trained or replaced, which are sampled next, and how often each was dropped.

A checkpoint holds what was *trained* (or replaced: that is done, too), not what was sampled:

    trained 0 1 2 4, in flight 3 5, finished 6        state: next 3, beyond it 4
    after a kill 3 is sampled next, then 5, 6, 7
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterable, Mapping
from typing import Any

from unbroken.errors import CheckpointError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.asynchronous.source import ChoosingSource


class GroupNumbers:
    """The numbers 0 to `stop` - 1, each of which is trained once; and for each that is replaced, one more."""

    def __init__(self, stop: int, *, chooser: ChoosingSource | None = None) -> None:
        """`chooser` is the source, if it chooses the problems."""
        self._chooser = chooser
        self._num_to_train = stop
        self._num_replaced = 0
        self._fresh = 0
        """The lowest number that was never given out."""
        self._again: list[int] = []
        """A heap of numbers to give out again."""
        self._lowest = 0
        """All numbers below are trained."""
        self._beyond: set[int] = set()
        """The others that are trained."""
        self._drops: dict[int, int] = {}

    @property
    def has_next(self) -> bool:
        """Whether there is a number to give out."""
        return bool(self._again) or self._fresh < self._stop

    def take_next(self) -> int:
        """Give out the lowest number that is neither trained nor given out; there must be one (`has_next`)."""
        if self._again:
            return heapq.heappop(self._again)
        assert self._fresh < self._stop, "has_next says whether there is one"
        self._fresh += 1
        return self._fresh - 1

    def put_back(self, number: int) -> None:
        """Give the number out again, before higher ones."""
        heapq.heappush(self._again, number)

    def count_drop(self, number: int) -> None:
        """Count that a group was too old."""
        self._drops[number] = self.num_drops(number) + 1

    def num_drops(self, number: int) -> int:
        """How often the group was too old."""
        return self._drops.get(number, 0)

    def mark_trained(self, numbers: Iterable[int]) -> None:
        """These are trained, and never given out again."""
        self._beyond.update(numbers)
        while self._lowest in self._beyond:
            self._beyond.remove(self._lowest)
            self._lowest += 1
        self._drops = {number: count for number, count in self._drops.items() if not self._is_trained(number)}

    def tell(self, number: int, group: TrajectoryGroup) -> None:
        """Tell the source that a group is trained or replaced, if it chooses by that."""
        if self._chooser is not None:
            self._chooser.tell(number, group)

    def mark_replaced(self, number: int) -> None:
        """It teaches nothing and is never given out again; there is one more number in its place."""
        self._num_replaced += 1
        self.mark_trained([number])

    def state(self) -> Mapping[str, Any]:
        """What is trained, in types that JSON can hold."""
        drops = sorted(self._drops.items())
        choices = {} if self._chooser is None else {"choices": copy.deepcopy(self._chooser.choices())}
        return {
            **choices,
            "next": self._lowest,
            "beyond": sorted(self._beyond),
            "drops": [list(pair) for pair in drops],
            "num_replaced": self._num_replaced,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: what is not trained is given out again.

        Raises:
            CheckpointError: its problems were chosen, and the source does not choose.
        """
        choices = state.get("choices")
        if choices is not None and self._chooser is None:
            raise CheckpointError("the run began with a curriculum and cannot continue without: give it the same")
        if choices is not None and self._chooser is not None:
            self._chooser.restore_choices(copy.deepcopy(choices))
        self._lowest, self._beyond = state["next"], set(state["beyond"])
        self._drops = dict(state["drops"])
        self._num_replaced = state.get("num_replaced", 0)
        self._fresh = max((number + 1 for number in self._beyond), default=self._lowest)
        self._again = [number for number in range(self._lowest, self._fresh) if number not in self._beyond]

    @property
    def _stop(self) -> int:
        return self._num_to_train + self._num_replaced

    def resume(self, state: Mapping[str, Any] | None, num_trained: int) -> None:
        """Go on from the state of a checkpoint; without one, the lowest `num_trained` were trained in their order."""
        self.restore(state or {"next": num_trained, "beyond": [], "drops": []})

    def _is_trained(self, number: int) -> bool:
        return number < self._lowest or number in self._beyond
