"""What is shown of the loop: metrics of idle times, and a timeline."""

from __future__ import annotations

import asyncio

import pytest

from support.pretend import PretendEngine, PretendSource, PretendTrainer, pretend_to_train
from unbroken.timeline import Timeline, TraceFile, read_timeline
from unbroken.training.config import LoopConfig
from unbroken.training.metrics.step_log import IdleTimes
from unbroken.training.queue import QUEUED, SAMPLED


def test_idle_shares_and_means_are_those_of_the_time_between_two_steps():
    now_s = 10.0
    times = IdleTimes(lambda: now_s)

    def at(seconds: float, **levels: float) -> None:
        nonlocal now_s
        now_s = seconds
        times.set(**levels)

    at(10.0, in_flight=1)
    at(10.0, waits=1)
    at(12.0, in_flight=0, queued=1)
    at(12.0, waits=0)
    assert times.take()[1] == {
        "idle/trainer": 1.0, "idle/sampler": 0.0, "idle/sampler_held": 0.0,
        "sampler/in_flight_mean": 1.0, "sampler/queued_mean": 0.0,
    }  # fmt: skip
    at(12.0, in_flight=0, queued=0)
    at(13.0, in_flight=2)
    at(14.0, held=1)
    at(15.0, in_flight=1, queued=1)
    at(15.0, held=0)
    at(16.0, waits=1)
    at(18.0, waits=0, in_flight=0, queued=2)
    now_s = 20.0
    seconds, shares = times.take()
    assert seconds == 8.0
    assert shares == pytest.approx({
        "idle/trainer": 2 / 8, "idle/sampler": 3 / 8, "idle/sampler_held": 1 / 8,
        "sampler/in_flight_mean": (2 * 2 + 3 * 1) / 8, "sampler/queued_mean": (3 * 1 + 2 * 2) / 8,
    })  # fmt: skip
    assert times.take() == (0.0, dict.fromkeys(shares))


def test_a_timeline_has_every_group_and_what_became_of_it(tmp_path):
    engine = PretendEngine(lambda version: 0.001)
    source = PretendSource(engine, lambda number, _: 0.4 if number == 3 else 0.002, 2)
    timeline = Timeline(TraceFile(tmp_path / "t.json", max_bytes=None), name="rank 0")
    config = LoopConfig(num_steps=30, max_staleness=2)
    asyncio.run(pretend_to_train(source, engine, PretendTrainer(lambda step: 0.02), config, timeline=timeline))
    timeline.close()
    events = read_timeline(tmp_path / "t.json")
    fates = [(each["cat"], each["args"]["fate"]) for each in events if each["ph"] == "e"]
    assert fates.count((QUEUED, "trained")) == 60
    assert fates.count((SAMPLED, "finished")) == 60
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
