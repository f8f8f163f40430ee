"""The events of the asynchronous loop on a timeline: what the trainer does, and what becomes of each group."""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.timeline import Timeline, Track
from unbroken.training.asynchronous.events import EventKind, LoopEvent, Observer

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


class TimelineObserver:
    """Writes events to a timeline whose clock is that of the event loop."""

    def __init__(self, timeline: Timeline) -> None:
        """Write to this timeline; it stays open."""
        self._timeline = timeline

    def observe(self, event: LoopEvent) -> None:
        """See `Observer`."""
        timeline, kind, at_s = self._timeline, event.kind, event.time_s
        if kind in _BEGINS:
            track, name = _BEGINS[kind]
            timeline.begin(track, name.format(step=event.step, version=event.version), at_s=at_s)
        if kind in _ENDS:
            timeline.end(_ENDS[kind], at_s=at_s)
        if kind in _VERSIONS and event.version is not None:
            timeline.count(f"version, {_VERSIONS[kind]}", at_s=at_s, version=event.version)
        if event.number is not None:
            self._move_group(event, event.number)

    def _move_group(self, event: LoopEvent, number: int) -> None:
        timeline, kind, at_s = self._timeline, event.kind, event.time_s
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


class Observers:
    """Several observers."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        """They see each event in this order."""
        self._observers = tuple(observers)

    def observe(self, event: LoopEvent) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.observe(event)
