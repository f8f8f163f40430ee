"""The staleness bound: which groups may start, which are trained next, and which are too old.

A group whose oldest id was sampled by version a may be trained at the versions a, a + 1, ..., a + S, and is too old
from then on. With P groups a step, and i groups before it that are not yet taken, a new group is trained i // P steps
after the next one. It starts only if that is in time, so S also bounds the groups that wait.

Worked example, S = 1 and P = 2, the engine has version 4:

    the next step has version 4    groups 0 1 are trained at 4, groups 2 3 at 5, group 4 would be at 6: it waits
    the next step has version 5    groups 0 1 are trained at 5: group 2 waits until the engine has version 5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Aged(Protocol):
    """What the bound asks of a group that is in flight or finished."""

    @property
    def oldest_version(self) -> int:
        """Version of its oldest id; while it is in flight, that of the engine when it started."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether it can be trained."""
        ...

    @property
    def is_protected(self) -> bool:
        """Whether the trainer waits for it, rather than making a step after which it would be too old."""
        ...


AgedT = TypeVar("AgedT", bound=Aged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The bound of one process."""

    max_staleness: int
    groups_per_step: int

    def may_start(self, num_live: int, *, next_version: int, engine_version: int) -> bool:
        """Whether a group that starts now behind `num_live` others can be trained in time.

        `next_version` is the version that the next step begins with, at the latest.
        """
        return next_version + num_live // self.groups_per_step - engine_version <= self.max_staleness

    def is_too_old(self, group: Aged, version: int) -> bool:
        """Whether the group may not be trained at this version or later."""
        return version - group.oldest_version > self.max_staleness

    def choose(self, live: Sequence[AgedT], version: int) -> list[AgedT] | None:
        """Choose the finished groups of a step that begins with `version`; None if it must wait.

        The oldest come first, in the order of `live` among equals. The step waits for protected groups if it would
        leave more of them than the steps after it can take in time.
        """
        finished = [group for group in live if group.is_finished]
        if len(finished) < self.groups_per_step:
            return None
        oldest_first = sorted(finished, key=lambda group: group.oldest_version)
        protected_first = sorted(oldest_first, key=lambda group: not group.is_protected)
        for order in (oldest_first, protected_first):
            chosen = order[: self.groups_per_step]
            left = [group for group in live if group.is_protected and all(group is not each for each in chosen)]
            if self._is_feasible(left, version + 1):
                return chosen
        return None

    def _is_feasible(self, groups: Sequence[Aged], version: int) -> bool:
        """Whether the steps from `version` on can take all of these groups in time."""
        due = sorted(group.oldest_version + self.max_staleness - version for group in groups)
        return all(steps >= 0 and index < (steps + 1) * self.groups_per_step for index, steps in enumerate(due))
