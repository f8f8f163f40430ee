"""What a run sees of its steps and does around them; the events of the loop, and the timeline and times of these.

groups ──► before_update ──► on_rollouts ──► updates ──► publish ──► on_step ──► after_step      around_step: all of it
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from unbroken.counters import Counters
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.timeline import Timeline, Track
from unbroken.training.metrics.writer import Metrics


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """What a process collected for one step, and what it trains on."""

    step: int
    """From 0."""
    groups: Sequence[TrajectoryGroup]
    units: Sequence[Any]
    """The objective's; `trainer.objective.get_rows` has their rows."""
    counters: Counters
    """Of this process's rollouts and dropped rows."""
    is_trained: bool
    """Whether a process has anything to train on. If so, the trainer may use the engine's memory."""


class RunObserver:
    """What a run adds to the loop, in each of its processes: a subclass overrides what it needs, the rest does nothing.

    The coroutines may wait for the other processes, and must fail in all of them or in none.
    """

    before_update: Callable[[], Awaitable[None]] | None = None
    """Called when a step's groups are sampled and there is something to train on: `SleepingEngine.sleep`, by which an
    engine of this process lends the trainer its memory until it gets the new weights. If the step fails, it stays
    asleep: the weights may be between two versions."""

    def around_step(self, step: int) -> AbstractContextManager[None]:
        """A block in which the step is made, from its first rollout to `after_step`; for profilers."""
        return nullcontext()

    async def on_resume(self) -> None:
        """See that a run goes on: the engines have the trainer's weights again, and nothing was sampled yet.

        After an `OutageError` it is called again, once the engine is back.
        """

    async def on_rollouts(self, rollouts: StepRollouts) -> None:
        """See a step's rollouts before they are trained on."""

    def on_step(self, step: int, metrics: Metrics) -> None:
        """See the metrics of a step, numbered from 0, once they are written."""

    async def after_step(self, num_steps: int) -> None:
        """Do what comes after a step, with the number of steps made; on resume, again for the last one.

        After an `OutageError` it is called again, once the engine is back.
        """

    def needs_engine(self, num_steps: int) -> bool:
        """Whether `after_step` samples after this number of steps. With `max_staleness` it then waits until the weights
        are published.
        """
        return type(self).after_step is not RunObserver.after_step

    def get_newest_version(self) -> int:
        """The newest weights of engines that the run publishes to besides the one that samples; 0 without any."""
        return 0

    def on_event(self, event: LoopEvent) -> None:
        """See what happens in the loop, in the thread of the event loop; it must return at once."""


SAMPLED = "group in flight"
QUEUED = "group in the queue"
_BEGINS = {
    EventKind.WAIT_BEGUN: (Track.TRAINER, "wait for groups"),
    EventKind.STEP_BEGUN: (Track.TRAINER, "step {step}"),
    EventKind.PUBLISH_BEGUN: (Track.PUBLISHER, "publish version {version}"),
    EventKind.HOLD_BEGUN: (Track.SAMPLER, "held by the staleness bound"),
    EventKind.OUTAGE_BEGUN: (Track.TRAINER, "outage"),
}
_ENDS = {
    EventKind.WAIT_ENDED: Track.TRAINER,
    EventKind.STEP_ENDED: Track.TRAINER,
    EventKind.PUBLISH_ENDED: Track.PUBLISHER,
    EventKind.HOLD_ENDED: Track.SAMPLER,
    EventKind.OUTAGE_ENDED: Track.TRAINER,
}
_FATES = {
    EventKind.GROUP_FINISHED: (SAMPLED, "finished"),
    EventKind.GROUP_CANCELLED: (SAMPLED, "cancelled"),
    EventKind.GROUP_LOST: (SAMPLED, "lost"),
    EventKind.GROUP_DROPPED: (QUEUED, "dropped"),
    EventKind.GROUP_REPLACED: (QUEUED, "replaced"),
    EventKind.GROUP_TAKEN: (QUEUED, "trained"),
}
_VERSIONS = {EventKind.STEP_ENDED: "trainer", EventKind.PUBLISH_ENDED: "published"}


def write_event(timeline: Timeline, event: LoopEvent) -> None:
    """Write an event to a timeline whose clock is that of the event loop."""
    kind, at_s = event.kind, event.time_s
    if kind in _BEGINS:
        track, name = _BEGINS[kind]
        timeline.begin(track, name.format(step=event.step, version=event.version), at_s=at_s)
    if kind in _ENDS:
        timeline.end(_ENDS[kind], at_s=at_s)
    if kind in _VERSIONS and event.version is not None:
        timeline.count(f"version, {_VERSIONS[kind]}", at_s=at_s, version=event.version)
    if event.number is not None:
        _move_group(timeline, event, event.number)


def _move_group(timeline: Timeline, event: LoopEvent, number: int) -> None:
    kind, at_s = event.kind, event.time_s
    if kind is EventKind.GROUP_STARTED:
        timeline.begin_lane(SAMPLED, number, at_s=at_s, version=event.version)
    if kind in _FATES:
        name, fate = _FATES[kind]
        step = {} if event.step is None else {"step": event.step}
        timeline.end_lane(name, number, at_s=at_s, fate=fate, ids=event.num_ids, version=event.version, **step)
    if kind is EventKind.GROUP_FINISHED:
        timeline.begin_lane(QUEUED, number, at_s=at_s, ids=event.num_ids, version=event.version)
    timeline.count("groups in flight", at_s=at_s, groups=event.num_in_flight)
    timeline.count("groups in the queue", at_s=at_s, groups=event.num_queued)


_STATE_BEGINS = {EventKind.WAIT_BEGUN: "waits", EventKind.HOLD_BEGUN: "held"}
_STATE_ENDS = {EventKind.WAIT_ENDED: "waits", EventKind.HOLD_ENDED: "held"}


class IdleTimes:
    """How long trainer and sampler were idle between two steps, and how many groups waited, in one process.

    Worked example, in seconds: the trainer waits from 0 to 2 and takes a step's groups, groups are in flight from 0 to
    5, none may start from 4 to 6, and at 8 the next groups are taken. Since 2 the trainer did not wait, nothing was in
    flight for 3 of 6 s (0.5), and 2 of 6 s were held.
    """

    def __init__(self) -> None:
        """The times begin with the first event."""
        self._states: set[str] = set()
        self._sums: dict[str, float] = {}
        self._started_s: float | None = None
        self._last_s = 0.0
        self._num_in_flight = 0
        self._num_queued = 0

    def observe(self, event: LoopEvent) -> None:
        """See one event."""
        self._advance(event.time_s)
        if event.kind in _STATE_BEGINS:
            self._states.add(_STATE_BEGINS[event.kind])
        if event.kind in _STATE_ENDS:
            self._states.discard(_STATE_ENDS[event.kind])
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


_STEP_SPANS = ("log", "after_step", "units", "sleep", "records", "score", "metrics")
"""Parts that a `StepTimes` measures."""
_OTHER_PARTS = ("collect", "outages", "train", "checkpoint", "publish")
"""Parts that are measured where the work is done."""


class StepTimes:
    """Measures the parts of one step after the other, for `seconds/wall` and what it consists of.

    Worked example, in seconds: the metrics of the step before were complete at 10.0, and those of this one are at 11.0.

        log 0.02   after_step 0.03   collect 0.5   sleep 0.05   train 0.2   publish 0.1   other 0.1   ──►   wall 1.0
    """

    def __init__(self) -> None:
        """The first step begins now."""
        self._began_s = time.perf_counter()
        self._spans: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to a part. Blocks are not nested, or they would count twice."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began_s)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a part, or take some away that are in another one."""
        assert name in _STEP_SPANS
        self._spans[name] += seconds

    def end_step(self, logged: Metrics) -> Metrics:
        """End the step, and return the metrics of its parts besides those that are in `logged`."""
        now_s = time.perf_counter()
        wall_s, self._began_s = now_s - self._began_s, now_s
        spans: Metrics = {f"seconds/{name}": self._spans[name] for name in _STEP_SPANS}
        self._spans.clear()
        known = {**logged, **spans}
        found = sum(known.get(f"seconds/{name}") or 0.0 for name in (*_STEP_SPANS, *_OTHER_PARTS))
        return {**spans, "seconds/other": wall_s - found, "seconds/wall": wall_s}

    @staticmethod
    def unknown() -> Metrics:
        """The metrics of a step that another process has made."""
        return {f"seconds/{name}": None for name in (*_STEP_SPANS, "other", "wall")}
