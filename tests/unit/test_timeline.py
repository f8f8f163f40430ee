"""Timelines: valid at every moment, also after a crash; bounded; continued by the next start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unbroken.timeline import Timeline, TraceFile, Track, read_timeline


def write(path, num_spans: int = 3, **options) -> Timeline:
    now = iter(range(10**6))
    timeline = Timeline(
        TraceFile(path, max_bytes=options.pop("max_bytes", None)),
        name="rank 0",
        clock=lambda: float(next(now)),
        origin_s=0.0,
        **options,
    )
    for number in range(num_spans):
        with timeline.span(f"step {number}", version=number):
            timeline.begin_lane("group", number, version=number)
            timeline.count("groups", groups=number)
            timeline.end_lane("group", number, fate="trained")
    return timeline


def events_of(path, phases: str) -> list[dict]:
    return [event for event in read_timeline(path) if event["ph"] in phases]


def test_a_file_that_was_ended_is_a_json_array_of_nested_slices(tmp_path):
    write(tmp_path / "t.json").close()
    events = json.loads((tmp_path / "t.json").read_text())
    assert events == read_timeline(tmp_path / "t.json")
    rows = [event["args"]["name"] for event in events if event.get("name") == "thread_name"]
    assert rows == [track.label for track in Track]
    slices = [event for event in events if event["ph"] in "BE"]
    assert [event["ph"] for event in slices] == ["B", "E"] * 3
    assert [event["ts"] for event in events if event["ph"] != "M"] == [1_000_000 * k for k in range(15)]
    assert slices[0] == {"ph": "B", "ts": 0, "pid": 1, "name": "step 0", "tid": 1, "args": {"version": 0}}
    lanes = [(event["ph"], event["cat"], event["id"]) for event in events if event["ph"] in "be"]
    assert lanes == [(phase, "group", str(number)) for number in range(3) for phase in "be"]


def test_a_file_is_readable_wherever_a_crash_has_cut_it(tmp_path):
    path = tmp_path / "t.json"
    write(path).close()
    data, whole = path.read_bytes(), read_timeline(path)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert read_timeline(path) == whole[: len(read_timeline(path))]
    assert len(read_timeline(path)) == len(whole)


def test_a_file_that_is_not_ended_lacks_only_the_bracket(tmp_path):
    timeline = write(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text() + "]") == read_timeline(tmp_path / "t.json")
    timeline.close()


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_the_next_start_continues_a_killed_one_under_a_number_of_its_own(tmp_path, cut):
    path = tmp_path / "t.json"
    killed = write(path, rank=2)
    killed.begin(Track.TRAINER, "never ended")
    data = path.read_bytes()
    killed.close()
    path.write_bytes(data[: -cut or None])
    write(path, rank=2).close()
    write(path, rank=2).close()
    assert json.loads(path.read_text())
    assert {event["pid"] for event in read_timeline(path)} == {2001, 2002, 2003}
    assert len(events_of(path, "E")) == 9


def test_the_newest_events_are_kept_within_the_bound(tmp_path):
    path = tmp_path / "t.json"
    write(path, num_spans=400, max_bytes=20_000).close()
    previous = tmp_path / "t.previous.json"
    assert path.stat().st_size + previous.stat().st_size <= 20_000 + 200
    for each in (path, previous):
        assert json.loads(each.read_text())[0]["name"] == "process_name"
    names = [event["name"] for each in (previous, path) for event in events_of(each, "B")]
    assert names == [f"step {number}" for number in range(400 - len(names), 400)]
    assert len(names) > 20


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    timeline = Timeline()
    with timeline.span("step"):
        timeline.count("groups", groups=1)
    timeline.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_ends_the_timeline_and_not_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    timeline = write(tmp_path / "file" / "t.json")
    timeline.close()
    assert "ends here" in caplog.text
    full = TraceFile(tmp_path / "full.json", max_bytes=None)
    full._file.close()
    full._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    Timeline(full, name="rank 0").begin(Track.TRAINER, "step")
    assert "No space left" in caplog.text
