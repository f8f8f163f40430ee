"""I8: each bridge, fork, refusal, truncation, closing, parse failure and dropped row is counted, by reason."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum


class Event(StrEnum):
    """What is counted. The metrics show `event/reason`."""

    BRIDGE = "bridges"
    HISTORY = "history"
    """What the template would have done to everything before a bridge (`HistoryEffect`), where somebody looked."""
    SHADOW_AUDIT = "shadow_audits"
    FORK = "forks"
    REFUSAL = "refusals"
    TRUNCATION = "truncations"
    CLOSING = "closings"
    PARSE_FAILURE = "parse_failures"
    DROPPED_ROW = "dropped_rows"
    TOOL_ERROR = "tool_errors"
    LIMIT = "limits"
    CLOSE_FAILURE = "close_failures"
    STATUS = "status"


class Counters:
    """Counts of `event/reason`, e.g. `closings/truncated`: 3."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, event: Event, reason: StrEnum | str, times: int = 1) -> None:
        """Add `times` to `event/reason`; 0 leaves no trace."""
        if times:
            self._counts[f"{event.value}/{reason}"] += times

    def merge(self, other: Counters) -> None:
        """Add all of another's counts to these."""
        self._counts.update(other._counts)

    def total(self, event: Event) -> int:
        """The sum over all reasons of one event."""
        return sum(n for key, n in self._counts.items() if key.startswith(f"{event.value}/"))

    def as_dict(self) -> dict[str, int]:
        """A copy, sorted by key: what the metrics log."""
        return dict(sorted(self._counts.items()))

    def __getitem__(self, key: str) -> int:
        return self._counts[key]

    def __repr__(self) -> str:
        return f"Counters({self.as_dict()})"
