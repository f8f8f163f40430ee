"""Counters of events by reason (I8), and of the ids that a piece of work has sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum


class Event(StrEnum):
    """A counted event. The metrics show `event/reason`."""

    BRIDGE = "bridges"
    HISTORY = "history"
    """The template's effect on the history before a bridge (`HistoryEffect`), if it is known."""
    FORK = "forks"
    REFUSAL = "refusals"
    TRUNCATION = "truncations"
    CLOSING = "closings"
    PARSE_FAILURE = "parse_failures"
    DROPPED_ROW = "dropped_rows"
    PUNISHMENT = "punishments"
    """A trajectory that loses a part of its reward before it is compared."""
    TOOL_ERROR = "tool_errors"
    TEACHER_SKIP = "teacher_skips"
    """A trajectory that its teacher does not score, because with its prompt there would be other ids."""
    CUT = "cuts"
    """Text that was left out of a message because it was too long."""
    LIMIT = "limits"
    CLOSE_FAILURE = "close_failures"
    STATUS = "status"
    ADAPTED_ROLE = "adapted_roles"
    """A message of a server's client in a role that the template does not write (`server.roles`)."""
    TOLERANCE = "tolerances"
    """A difference between a reply and what an agent sent back for it, which was tolerated (`ledger.matching`)."""
    REQUIRED_CALL = "required_calls"
    """A reply without a call that was required, of an engine that cannot be constrained: `sampled_again`, or `missing`
    from the answer."""
    ABORTED = "aborted"
    """Ids of turns that were aborted and not recorded, or left out for a required call, in sessions with a limit of
    ids."""


class Counters:
    """Counts of `event/reason`, e.g. `closings/truncated`: 3."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, event: Event, reason: StrEnum | str, times: int = 1) -> None:
        """Add `times` to `event/reason`; 0 adds no key."""
        if times:
            self._counts[f"{event.value}/{reason}"] += times

    def add(self, key: str, times: int) -> None:
        """Add `times` to a key of `as_dict`."""
        self._counts[key] += times

    def merge(self, other: Counters) -> None:
        """Add all counts of `other`."""
        self._counts.update(other._counts)

    def total(self, event: Event) -> int:
        """Sum over all reasons of one event."""
        return sum(n for key, n in self._counts.items() if key.startswith(f"{event.value}/"))

    def as_dict(self) -> dict[str, int]:
        """The counts, sorted by key, as the metrics log them."""
        return dict(sorted(self._counts.items()))

    def __getitem__(self, key: str) -> int:
        return self._counts[key]

    def __repr__(self) -> str:
        return f"Counters({self.as_dict()})"


@dataclass(slots=True)
class Effort:
    """How many ids a piece of work has sampled so far, also if it is cancelled and leaves no record.

    The ids of a turn count when it has ended, those of an agent when its attempt has.
    """

    num_ids: int = 0

    def add(self, num_ids: int) -> None:
        """Count the ids of a turn."""
        self.num_ids += num_ids


_current_costs: ContextVar[dict[str, float] | None] = ContextVar("costs", default=None)


@contextmanager
def count_costs() -> Iterator[dict[str, float]]:
    """Collect what `add_cost` adds in the block, in this task and those that it starts."""
    costs: dict[str, float] = {}
    token = _current_costs.set(costs)
    try:
        yield costs
    finally:
        _current_costs.reset(token)


def add_cost(metric: str, value: float) -> None:
    """Count what a reward function does, under the name of a metric; 0 makes it known."""
    if (costs := _current_costs.get()) is not None:
        costs[metric] = costs.get(metric, 0) + value


_current_effort: ContextVar[Effort | None] = ContextVar("effort", default=None)


@contextmanager
def count_effort(effort: Effort) -> Iterator[None]:
    """Add to `effort` what rollouts sample that are started in the block, in this task and those that it starts."""
    token = _current_effort.set(effort)
    try:
        yield
    finally:
        _current_effort.reset(token)


def get_effort() -> Effort | None:
    """What counts in this task; None outside of `count_effort`."""
    return _current_effort.get()


def add_effort(num_ids: int) -> None:
    """Count the ids of a turn."""
    if (effort := _current_effort.get()) is not None:
        effort.add(num_ids)
