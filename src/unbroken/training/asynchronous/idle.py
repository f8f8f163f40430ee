"""How long trainer and sampler were idle between two steps, and how many groups waited, from the loop's events.

Worked example, in seconds: the trainer waits from 0 to 2 and takes a step's groups, groups are in flight from 0 to 5,
none may start from 4 to 6, and at 8 the next groups are taken. Since 2 the trainer did not wait, nothing was in flight
for 3 of 6 s (0.5), and 2 of 6 s were held.
"""

from __future__ import annotations

from collections.abc import Mapping

from unbroken.training.asynchronous.events import EventKind, LoopEvent

_BEGINS = {EventKind.WAIT_BEGUN: "waits", EventKind.HOLD_BEGUN: "held"}
_ENDS = {EventKind.WAIT_ENDED: "waits", EventKind.HOLD_ENDED: "held"}


class IdleTimes:
    """Adds up the times of one process."""

    def __init__(self) -> None:
        """The times begin with the first event."""
        self._states: set[str] = set()
        self._sums: dict[str, float] = {}
        self._started_s: float | None = None
        self._last_s = 0.0
        self._num_in_flight = 0
        self._num_queued = 0

    def observe(self, event: LoopEvent) -> None:
        """See `Observer`."""
        self._advance(event.time_s)
        if event.kind in _BEGINS:
            self._states.add(_BEGINS[event.kind])
        if event.kind in _ENDS:
            self._states.discard(_ENDS[event.kind])
        self._num_in_flight, self._num_queued = event.num_in_flight, event.num_queued

    def take_metrics(self, now_s: float) -> Mapping[str, float | None]:
        """The metrics of the time since the last call; None in no time at all."""
        self._advance(now_s)
        started_s = now_s if self._started_s is None else self._started_s
        total_s = now_s - started_s
        sums, self._sums, self._started_s = self._sums, {}, now_s

        def mean(name: str) -> float | None:
            return sums.get(name, 0.0) / total_s if total_s > 0 else None

        return {
            "idle/trainer": mean("waits"),
            "idle/sampler": mean("nothing"),
            "idle/sampler_held": mean("held"),
            "sampler/in_flight_mean": mean("in_flight"),
            "sampler/queued_mean": mean("queued"),
        }

    def _advance(self, now_s: float) -> None:
        if self._started_s is None:
            self._started_s = self._last_s = now_s
        seconds, self._last_s = now_s - self._last_s, now_s
        counts = {"in_flight": self._num_in_flight, "queued": self._num_queued, "nothing": self._num_in_flight == 0}
        for name, factor in {**counts, **dict.fromkeys(self._states, 1)}.items():
            self._sums[name] = self._sums.get(name, 0.0) + seconds * factor
