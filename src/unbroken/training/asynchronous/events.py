"""What happens in the asynchronous loop of one process, and when: for metrics and timelines."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class EventKind(StrEnum):
    """What happened. The fields of `LoopEvent` that are not named here have their defaults."""

    GROUP_STARTED = "group_started"
    """`number`, `version`: the weights that were published then."""
    GROUP_FINISHED = "group_finished"
    """`number`, `version`: of its oldest id, `num_ids`."""
    GROUP_CANCELLED = "group_cancelled"
    """`number`, `version`, `num_ids`: those of turns that had ended. It could not be trained in time any more."""
    GROUP_DROPPED = "group_dropped"
    """`number`, `version`, `num_ids`. It was finished, and is too old to be trained."""
    GROUP_REPLACED = "group_replaced"
    """`number`, `version`, `num_ids`. It was finished, and teaches nothing: that of another number takes its place."""
    GROUP_LOST = "group_lost"
    """`number`, `num_ids`. Its engine went away."""
    GROUP_TAKEN = "group_taken"
    """`number`, `version`: of its oldest id, `num_ids`, `step`."""
    WAIT_BEGUN = "wait_begun"
    """`step`. The trainer waits for groups."""
    WAIT_ENDED = "wait_ended"
    """`step`"""
    STEP_BEGUN = "step_begun"
    """`step`, `version`: that of the weights it begins with."""
    STEP_ENDED = "step_ended"
    """`step`, `version`: that of the weights it made."""
    PUBLISH_BEGUN = "publish_begun"
    """`version`"""
    PUBLISH_ENDED = "publish_ended"
    """`version`. Also if it failed; it is published again then."""
    HOLD_BEGUN = "hold_begun"
    """No group starts: it would be too old when its turn comes, or enough of them are on their way."""
    HOLD_ENDED = "hold_ended"
    """The next group has started."""
    OUTAGE_BEGUN = "outage_begun"
    """The engine went away; no group starts until it is back."""
    OUTAGE_ENDED = "outage_ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEvent:
    """One event."""

    kind: EventKind
    time_s: float
    """On the clock of the event loop."""
    number: int | None = None
    """Of the group."""
    step: int | None = None
    version: int | None = None
    num_ids: int = 0
    """Sampled ids."""
    num_in_flight: int
    """Groups that are being sampled, after the event."""
    num_queued: int
    """Groups that are finished and not yet taken, after the event."""


class Observer(Protocol):
    """Sees the events of one process, in their order, in the thread of the event loop. It must return at once."""

    def observe(self, event: LoopEvent) -> None:
        """See one event."""
        ...


class NoObserver:
    """Ignores all events."""

    def observe(self, event: LoopEvent) -> None:
        """See `Observer`."""
