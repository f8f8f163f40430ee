"""The registry of a cluster: which engines are listed, what is logged, and what one that starts again knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.cli import main
from unbroken.cluster.processes import ENGINES, FOLDER, Kind
from unbroken.cluster.registry import LOG, STATE, PartState, Registry, Report, make_event, read_events, write_event
from unbroken.timeline import read_timeline
from unbroken.viewer.resources import open_runs

EXPECTED = {"trainers-0": Kind.TRAINERS, "engine-0": Kind.ENGINE, "engine-1": Kind.ENGINE}
ENGINE = PartState(name="engine-0", kind=Kind.ENGINE, node="a", state="serves", url="http://a:1", version=3, pid=7)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(tmp_path: Path, clock: Clock) -> Iterator[Registry]:
    (tmp_path / FOLDER).mkdir()
    registry = Registry(tmp_path, EXPECTED, clock=clock)
    yield registry
    registry.close()


def listed(folder: Path) -> list[str]:
    return (folder / FOLDER / ENGINES).read_text().split()


def parts(folder: Path) -> dict[str, dict]:
    return {part["name"]: part for part in json.loads((folder / FOLDER / STATE).read_text())["parts"]}


def events(folder: Path) -> list[tuple[str, str]]:
    return [(event.part or event.node, event.what) for event in read_events(folder / FOLDER / LOG)]


def test_engines_that_serve_are_listed(registry, tmp_path):
    registry.watch({"a"})
    assert listed(tmp_path) == []
    registry.report(Report(state=replace(ENGINE, state="starts", url="")))
    registry.report(Report(state=replace(ENGINE, name="engine-1", url="http://a:2", version=4)))
    registry.watch({"a"})
    assert listed(tmp_path) == ["http://a:2"]
    registry.report(Report(state=ENGINE))
    registry.watch({"a"})
    assert listed(tmp_path) == ["http://a:1", "http://a:2"]
    state = json.loads((tmp_path / FOLDER / STATE).read_text())
    assert state["versions"] == {"3": 1, "4": 1}
    assert parts(tmp_path)["trainers-0"]["state"] == "waits"


def test_parts_of_a_node_that_dies_are_lost_with_the_reason(registry, tmp_path):
    registry.report(Report(state=ENGINE))
    registry.watch({"a", "b"})
    registry.watch({"b"})
    assert listed(tmp_path) == []
    assert events(tmp_path) == [("a", "joined"), ("b", "joined"), ("a", "died"), ("engine-0", "lost")]
    found = parts(tmp_path)["engine-0"]
    assert (found["state"], found["restarts"], found["reason"]) == ("lost", 1, "its node a died")
    registry.report(Report(state=replace(ENGINE, node="b")))
    registry.watch({"b"})
    assert listed(tmp_path) == ["http://a:1"]


def test_a_part_that_is_silent_is_lost(registry, tmp_path, clock):
    registry.report(Report(state=ENGINE))
    clock.now_s += 9
    registry.watch(set())
    assert listed(tmp_path) == ["http://a:1"]
    clock.now_s += 2
    registry.watch(set())
    assert listed(tmp_path) == []
    assert parts(tmp_path)["engine-0"]["reason"] == "it did not report for 11 s"


def test_an_event_that_is_told_twice_is_logged_once(registry, tmp_path):
    event = make_event("engine-0", "a", "restart", "it was killed")
    for _ in range(2):
        registry.report(Report(state=ENGINE, events=(event,)))
    registry.watch(set())
    assert events(tmp_path) == [("engine-0", "restart")]
    assert parts(tmp_path)["engine-0"]["restarts"] == 1


def test_a_line_that_was_never_finished_spoils_no_other(registry, tmp_path):
    log = tmp_path / FOLDER / LOG
    write_event(log, make_event("engine-0", "a", "start"))
    whole = log.read_bytes()
    log.write_bytes(whole + whole[:20])  # the disk was full
    registry.note(make_event("engine-0", "a", "restart", "it ended"))
    assert events(tmp_path) == [("engine-0", "start"), ("engine-0", "restart")]


def test_a_registry_that_starts_again_ends_the_lives_that_it_did_not_see_begin(registry, tmp_path, clock):
    registry.watch({"a", "b"})
    registry.report(Report(state=ENGINE, events=(make_event("engine-0", "a", "serves"),)))
    again = Registry(tmp_path, EXPECTED, clock=clock)
    again.watch({"b"})
    lanes = read_timeline(tmp_path / "timeline" / "cluster.json")
    assert [event["name"] for event in lanes if event["ph"] == "e"] == ["node a", "engine-0"]
    again.close()


def test_an_event_that_could_not_be_written_may_be_told_again(registry, tmp_path):
    event, log = make_event("engine-0", "a", "restart", "it ended"), tmp_path / FOLDER / LOG
    log.unlink(missing_ok=True)
    log.mkdir()
    with pytest.raises(OSError, match="directory"):
        registry.note(event)
    log.rmdir()
    registry.note(event)
    assert events(tmp_path) == [("engine-0", "restart")]


def test_a_registry_that_starts_again_knows_restarts_and_takes_no_engine_from_the_list(registry, tmp_path, clock):
    event = make_event("engine-0", "a", "restart", "it was killed")
    registry.report(Report(state=ENGINE, events=(event,)))
    registry.watch({"a"})
    registry.report(Report(state=ENGINE, events=(make_event("engine-1", "b", "serves"),)))
    again = Registry(tmp_path, EXPECTED, clock=clock)
    again.watch({"a"})
    assert listed(tmp_path) == ["http://a:1"]
    again.note(event)
    clock.now_s += 6
    again.watch({"a"})
    assert listed(tmp_path) == []
    assert parts(tmp_path)["engine-0"]["restarts"] == 1
    assert events(tmp_path).count(("engine-0", "restart")) == 1
    again.watch({"b"})
    assert events(tmp_path)[-2:] == [("a", "died"), ("engine-0", "lost")]
    assert parts(tmp_path)["engine-1"]["node"] == "b"
    again.close()


def test_a_run_that_begins_again_knows_its_restarts_but_no_node_of_the_one_before(registry, tmp_path, clock):
    registry.report(Report(state=ENGINE, events=(make_event("engine-0", "a", "restart", "it was killed"),)))
    registry.watch({"a"})
    write_event(tmp_path / FOLDER / LOG, make_event("run", "", "begin"))
    again = Registry(tmp_path, EXPECTED, clock=clock)
    again.watch({"b"})
    assert events(tmp_path)[-2:] == [("run", "begin"), ("b", "joined")]
    assert listed(tmp_path) == []
    assert parts(tmp_path)["engine-0"]["restarts"] == 1
    again.close()


def test_the_timeline_has_the_life_of_nodes_and_parts(registry, tmp_path):
    registry.watch({"a"})
    registry.report(Report(state=ENGINE))
    registry.report(Report(state=replace(ENGINE, state="waits", url="")))
    registry.report(Report(state=ENGINE))
    registry.close()
    lanes = [(event["ph"], event["name"]) for event in read_timeline(tmp_path / "timeline" / "cluster.json")]
    assert [lane for lane in lanes if lane[0] in "be"] == [
        ("b", "node a"), ("b", "engine-0"), ("e", "engine-0"), ("b", "engine-0"), ("e", "node a"), ("e", "engine-0")
    ]  # fmt: skip
    assert {part["state"] for part in parts(tmp_path).values()} == {"ended"}


def test_the_status_is_printed_with_the_numbers_of_the_last_step(registry, tmp_path, capsys):
    registry.report(Report(state=ENGINE, events=(make_event("engine-0", "a", "restart", "it was killed"),)))
    registry.watch({"a"})
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "metrics.jsonl").write_text('{"step": 4, "reward/mean": 0.5, "train/policy_version": 5}\n')
    assert main(["cluster", "status", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "step 4, trained version 5, reward 0.5" in text
    assert "versions at engines: 3 on 1; nodes: a" in text
    assert "engine-0     serves on a at http://a:1 version 3; 1 restarts, the last because: it was killed" in text
    assert main(["cluster", "status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 4


def test_the_viewer_has_the_parts_and_their_events(registry, tmp_path):
    registry.report(Report(state=ENGINE, events=(make_event("engine-0", "a", "restart", "it was killed"),)))
    registry.watch({"a"})
    (tmp_path / "recipe.json").write_text("{}")
    cluster = open_runs([tmp_path]).get("run/0")["cluster"]
    assert [part["name"] for part in cluster["state"]["parts"]] == [*EXPECTED]
    assert [(event["part"], event["what"]) for event in cluster["events"]] == [("engine-0", "restart"), ("", "joined")]
