"""Counts the ids that a piece of work has sampled so far, also if it is cancelled and leaves no record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Effort:
    """The ids of the turns that have ended; of agents, of the attempts."""

    num_ids: int = 0

    def add(self, num_ids: int) -> None:
        """Count the ids of a turn."""
        self.num_ids += num_ids


_current: ContextVar[Effort | None] = ContextVar("effort", default=None)


@contextmanager
def count_effort(effort: Effort) -> Iterator[None]:
    """Add to `effort` what rollouts sample that are started in the block, in this task and those that it starts."""
    token = _current.set(effort)
    try:
        yield
    finally:
        _current.reset(token)


def get_effort() -> Effort | None:
    """What counts in this task; None outside of `count_effort`."""
    return _current.get()


def add_effort(num_ids: int) -> None:
    """Count the ids of a turn."""
    if (effort := _current.get()) is not None:
        effort.add(num_ids)
