"""What observers make of the loop's events: metrics of idle times, and a timeline."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from support.turns import TurnEngine, TurnMaker, TurnSource
from unbroken.timeline import Timeline, TraceFile, read_timeline
from unbroken.training.config import LoopConfig
from unbroken.training.loop import run_steps
from unbroken.training.observer import QUEUED, SAMPLED, EventKind, IdleTimes, LoopEvent, write_event


def event(kind: EventKind, time_s: float, num_in_flight: int = 0, num_queued: int = 0, **fields) -> LoopEvent:
    return LoopEvent(kind=kind, time_s=time_s, num_in_flight=num_in_flight, num_queued=num_queued, **fields)


def test_idle_shares_and_means_are_those_of_the_time_between_two_steps():
    times = IdleTimes()
    for each in (
        event(EventKind.GROUP_STARTED, 10.0, 1),
        event(EventKind.WAIT_BEGUN, 10.0, 1),
        event(EventKind.GROUP_FINISHED, 12.0, 0, 1),
        event(EventKind.WAIT_ENDED, 12.0, 0, 1),
    ):
        times.observe(each)
    assert times.take_metrics(12.0) == {
        "idle/trainer": 1.0, "idle/sampler": 0.0, "idle/sampler_held": 0.0,
        "sampler/in_flight_mean": 1.0, "sampler/queued_mean": 0.0,
    }  # fmt: skip
    times.observe(event(EventKind.GROUP_TAKEN, 12.0))
    times.observe(event(EventKind.GROUP_STARTED, 13.0, 2))
    times.observe(event(EventKind.HOLD_BEGUN, 14.0, 2))
    times.observe(event(EventKind.GROUP_FINISHED, 15.0, 1, 1))
    times.observe(event(EventKind.HOLD_ENDED, 15.0, 1, 1))
    times.observe(event(EventKind.WAIT_BEGUN, 16.0, 1, 1))
    times.observe(event(EventKind.WAIT_ENDED, 18.0, 0, 2))
    found = times.take_metrics(20.0)
    assert found == pytest.approx({
        "idle/trainer": 2 / 8, "idle/sampler": 3 / 8, "idle/sampler_held": 1 / 8,
        "sampler/in_flight_mean": (2 * 2 + 3 * 1) / 8, "sampler/queued_mean": (3 * 1 + 2 * 2) / 8,
    })  # fmt: skip
    assert times.take_metrics(20.0)["idle/trainer"] is None


def test_a_timeline_has_every_group_and_what_became_of_it(tmp_path):
    engine = TurnEngine()
    source = TurnSource(engine, lambda number, _: 300 if number == 3 else 2, 2)
    maker = TurnMaker(engine)
    timeline = Timeline(TraceFile(tmp_path / "t.json", max_bytes=None), name="rank 0")
    asyncio.run(run_steps(source, maker, LoopConfig(num_steps=30, max_staleness=2, max_drops=1),
                          observe=partial(write_event, timeline)))  # fmt: skip
    timeline.close()
    events = read_timeline(tmp_path / "t.json")
    fates = [(each["cat"], each["args"]["fate"]) for each in events if each["ph"] == "e"]
    assert fates.count((QUEUED, "trained")) == 60
    assert fates.count((SAMPLED, "finished")) == 60 + fates.count((QUEUED, "dropped"))
    assert fates.count((SAMPLED, "cancelled")) == 1
    for phase, other in (("b", "e"), ("B", "E")):
        assert sum(each["ph"] == phase for each in events) == sum(each["ph"] == other for each in events)
    begun = [each["name"] for each in events if each["ph"] == "B"]
    assert [name for name in begun if name.startswith("step")] == [f"step {number}" for number in range(30)]
    assert [name for name in begun if name.startswith("publish")] == [f"publish version {k + 1}" for k in range(30)]
    assert {each["name"] for each in events if each["ph"] == "C"} == {
        "groups in flight", "groups in the queue", "version, trainer", "version, published"
    }  # fmt: skip
    times = [each["ts"] for each in events if each["ph"] != "M"]
    assert times == sorted(times)
