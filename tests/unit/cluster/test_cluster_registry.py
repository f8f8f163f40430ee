"""The registry of a cluster: which engines are listed, what is logged, and the life of nodes and parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.cli import main
from unbroken.cluster.processes import Kind, PartState
from unbroken.cluster.registry import ENGINES, FOLDER, LOG, STATE, Registry
from unbroken.timeline import read_timeline
from unbroken.viewer.resources import open_runs

PARTS = {"trainers-0": Kind.TRAINERS, "engine-0": Kind.ENGINE, "engine-1": Kind.ENGINE}


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    (tmp_path / FOLDER).mkdir()
    registry = Registry(tmp_path, PARTS)
    yield registry
    registry.close()


def serve(registry: Registry, name: str = "engine-0", version: int = 3) -> None:
    part = PartState(name=name, kind=Kind.ENGINE, node="a", state="serves", url=f"http://a/{name}", version=version)
    registry.update(part)


def listed(folder: Path) -> list[str]:
    return (folder / FOLDER / ENGINES).read_text().split()


def parts(folder: Path) -> dict[str, dict]:
    return {part["name"]: part for part in json.loads((folder / FOLDER / STATE).read_text())["parts"]}


def events(folder: Path) -> list[tuple[str, str]]:
    found = []
    for line in (folder / FOLDER / LOG).read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        found.append((event["part"] or event["node"], event["what"]))
    return found


def test_engines_that_serve_are_listed_with_their_versions(registry, tmp_path):
    registry.watch({"a"})
    assert listed(tmp_path) == []
    serve(registry, "engine-1", 4)
    assert listed(tmp_path) == ["http://a/engine-1"]
    serve(registry)
    registry.watch({"a"})
    assert listed(tmp_path) == ["http://a/engine-0", "http://a/engine-1"]
    assert json.loads((tmp_path / FOLDER / STATE).read_text())["versions"] == {"3": 1, "4": 1}
    assert parts(tmp_path)["trainers-0"]["state"] == "waits"
    registry.update(PartState(name="engine-0", kind=Kind.ENGINE))
    registry.watch({"a"})
    assert listed(tmp_path) == ["http://a/engine-1"]


def test_what_happens_is_logged_and_printed_with_the_reason(registry, tmp_path, capsys):
    registry.watch({"a", "b"})
    serve(registry)
    serve(registry)
    registry.note("engine-0", "restart", "it was killed", node="a")
    registry.watch({"b"})
    assert events(tmp_path) == [
        ("a", "joined"), ("b", "joined"), ("engine-0", "serves"), ("engine-0", "restart"), ("a", "died")
    ]  # fmt: skip
    found = parts(tmp_path)["engine-0"]
    assert (found["restarts"], found["reason"]) == (1, "it was killed")
    assert capsys.readouterr().out.splitlines()[3].endswith("] engine-0 restart on a: it was killed")


def test_a_line_that_was_never_finished_spoils_no_other(registry, tmp_path):
    log = tmp_path / FOLDER / LOG
    registry.note("engine-0", "start", node="a")
    whole = log.read_bytes()
    log.write_bytes(whole + whole[:20])  # the disk was full
    registry.note("engine-0", "restart", "it ended", node="a")
    assert events(tmp_path) == [("engine-0", "start"), ("engine-0", "restart")]
    again = Registry(tmp_path, PARTS)
    again.close()
    assert parts(tmp_path)["engine-0"]["restarts"] == 1


def test_an_event_that_could_not_be_written_is_written_later(registry, tmp_path, capsys):
    log = tmp_path / FOLDER / LOG
    log.mkdir()
    registry.note("engine-0", "restart", "it ended", node="a")
    assert "the registry cannot write" in capsys.readouterr().out
    log.rmdir()
    registry.watch(set())
    assert events(tmp_path) == [("engine-0", "restart")]


def test_a_run_that_begins_again_knows_its_restarts_but_no_engine_of_the_one_before(registry, tmp_path):
    serve(registry)
    registry.note("engine-0", "restart", "it was killed", node="a")
    again = Registry(tmp_path, PARTS)
    again.watch({"b"})
    assert events(tmp_path)[-1] == ("b", "joined")
    assert listed(tmp_path) == []
    assert parts(tmp_path)["engine-0"]["restarts"] == 1
    again.close()


def test_the_timeline_has_the_life_of_nodes_and_parts(registry, tmp_path):
    registry.watch({"a"})
    serve(registry)
    registry.update(PartState(name="engine-0", kind=Kind.ENGINE))
    serve(registry)
    registry.close()
    lanes = [(event["ph"], event["name"]) for event in read_timeline(tmp_path / "timeline" / "cluster.json")]
    assert [lane for lane in lanes if lane[0] in "be"] == [
        ("b", "node a"), ("b", "engine-0"), ("e", "engine-0"), ("b", "engine-0"), ("e", "engine-0"), ("e", "node a")
    ]  # fmt: skip
    assert {part["state"] for part in parts(tmp_path).values()} == {"ended"}


def test_the_status_is_printed_with_the_numbers_of_the_last_step(registry, tmp_path, capsys):
    registry.watch({"a"})
    serve(registry)
    registry.note("engine-0", "restart", "it was killed", node="a")
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "metrics.jsonl").write_text('{"step": 4, "reward/mean": 0.5, "train/policy_version": 5}\n')
    assert main(["cluster", "status", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "step 4, trained version 5, reward 0.5" in text
    assert "versions at engines: 3 on 1; nodes: a" in text
    assert (
        "engine-0     serves on a at http://a/engine-0 version 3; 1 restarts, the last because: it was killed" in text
    )
    assert main(["cluster", "status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 4


def test_the_viewer_has_the_parts_and_their_events(registry, tmp_path):
    registry.watch({"a"})
    serve(registry)
    registry.note("engine-0", "restart", "it was killed", node="a")
    (tmp_path / "recipe.json").write_text("{}")
    cluster = open_runs([tmp_path]).get("run/0")["cluster"]
    assert [part["name"] for part in cluster["state"]["parts"]] == [*PARTS]
    assert [(event["part"], event["what"]) for event in cluster["events"]] == [
        ("", "joined"), ("engine-0", "serves"), ("engine-0", "restart")
    ]  # fmt: skip
