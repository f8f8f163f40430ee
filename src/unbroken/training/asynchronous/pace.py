"""How far ahead the sampler works: no further than keeps the trainer busy, since every group that waits grows older.

The limit of groups that are in flight or wait rises by a step's groups after each step that the trainer waited for, and
falls by an eighth of them after each step that found others ready besides its own. It does not fall to one that the
trainer waited with, until 32 steps have passed since.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_WAITED = 0.01
"""The share of a step's time from which on the trainer has waited."""
_FALL = 1 / 8
_REMEMBERED = 32
"""Steps for which a limit is remembered as too low."""
_READY = 1 / 4
"""The share of a step's groups that must be ready besides its own before the limit falls."""


@dataclass(slots=True, kw_only=True)
class Pace:
    """The limit of one process."""

    groups_per_step: int
    max_staleness: int
    is_adapted: bool
    """Otherwise it is always the highest that the staleness bound allows."""
    limit: int = field(init=False)
    """Groups in flight and finished."""

    _too_low: int = field(init=False, default=0)
    """The last limit that the trainer waited with."""
    _num_steps: int = field(init=False, default=0)
    """Since then."""

    def __post_init__(self) -> None:
        self.limit = 2 * self.groups_per_step if self.is_adapted else self._highest

    def end_wait(self, *, waited_s: float, since_last_s: float, num_queued: int) -> None:
        """Adapt the limit when the groups of a step are taken.

        The trainer waited `waited_s` of the `since_last_s` since it took those of the step before; `num_queued` others
        are finished.
        """
        if not self.is_adapted:
            return
        self._num_steps += 1
        if waited_s > _WAITED * since_last_s:
            self._too_low, self._num_steps = self.limit, 0
            self.limit = min(self.limit + self.groups_per_step, self._highest)
        elif num_queued >= _READY * self.groups_per_step:
            fallen = self.limit - math.ceil(_FALL * self.groups_per_step)
            if fallen >= self.groups_per_step and (fallen > self._too_low or self._num_steps > _REMEMBERED):
                self.limit = fallen

    @property
    def _highest(self) -> int:
        return (self.max_staleness + 1) * self.groups_per_step
