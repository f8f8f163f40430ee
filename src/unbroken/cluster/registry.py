"""Which parts live where, what happened to them, and the files that say so.

cluster/engines.txt     URLs of the engines that serve: the trainers' `engine.urls_file`
cluster/log.jsonl       each event, with its reason, for ever
cluster/state.json      how it is now: for `unbroken cluster status` and `unbroken view`
timeline/cluster.json   the life of each node and part, for https://ui.perfetto.dev

A registry that is started again reads its log, and hears from all parts within a second or two.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from unbroken.cluster.processes import ENGINES, FOLDER, Kind
from unbroken.timeline import Timeline, TraceFile

LOG, STATE = "log.jsonl", "state.json"
_SILENT_S = 10.0
"""A part that has not reported for so long is lost."""
_LISTEN_S = 5.0
"""How long a registry that was started again waits for parts before it takes engines from the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEvent:
    """What happened to a part or a node."""

    number: str
    """Unique: an event may be reported twice."""
    time_s: float
    """Since 1970."""
    part: str
    node: str
    what: str
    """begin, start, serves, trains, restart, lost, joined, died, end."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """How a part is."""

    name: str
    kind: Kind
    node: str
    """Its name, which is unique."""
    state: str
    """waits, starts, serves, trains, lost, ended."""
    url: str = ""
    version: int | None = None
    pid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a part says each second."""

    state: PartState
    events: tuple[ClusterEvent, ...] = ()


class Registry:
    """Collects reports of parts and looks at the nodes. Used in one thread at a time."""

    def __init__(self, output: Path, expected: Mapping[str, Kind], *, clock: Callable[[], float] = time.time) -> None:
        """`expected` are all parts of the run."""
        self._folder = output / FOLDER
        self._clock = clock
        self._started_s = clock()
        self._parts = {name: PartState(name=name, kind=kind, node="", state="waits") for name, kind in expected.items()}
        self._heard_s: dict[str, float] = {}
        self._restarts: dict[str, int] = {}
        self._reasons: dict[str, str] = {}
        self._nodes: dict[str, float] = {}
        """Since when each that lives is known."""
        self._seen: set[str] = set()
        self._lanes: dict[str, None] = {}
        """Nodes and parts whose life has begun in the timeline."""
        self._timeline = Timeline(
            TraceFile(output / "timeline" / "cluster.json", max_bytes=None), name="cluster", rank=900, clock=clock,
            origin_s=0.0,
        )  # fmt: skip
        self._is_new = True
        for event in read_events(self._folder / LOG):
            self._remember(event)

    def report(self, report: Report) -> None:
        """Take a part's report."""
        state, before = report.state, self._parts.get(report.state.name)
        for event in report.events:
            self.note(event)
        if before is not None and before.node and before.node != state.node and before.state != "lost":
            self._lose(before, f"it is on node {state.node} now")
        self._parts[state.name] = state
        self._heard_s[state.name] = self._clock()
        self._show_life(state)

    def note(self, event: ClusterEvent) -> None:
        """Write an event into the log, once."""
        if event.number in self._seen:
            return
        write_event(self._folder / LOG, event)  # first: a part tells of it again if that fails
        self._count(event)

    def watch(self, nodes: Set[str]) -> None:
        """Compare the names of the nodes that live with those that were there; then write the files."""
        now_s = self._clock()
        for name in sorted(nodes - self._nodes.keys()):
            self._nodes[name] = now_s
            self._note_node(name, "joined")
        for name in sorted(self._nodes.keys() - nodes):
            del self._nodes[name]
            self._note_node(name, "died")
            for part in self._parts.values():
                if part.node == name and part.state != "lost":
                    self._lose(part, f"its node {name} died")
        for part in self._parts.values():
            silent_s = now_s - self._heard_s.get(part.name, now_s)
            if silent_s > _SILENT_S and part.state not in ("lost", "ended", "waits"):
                self._lose(part, f"it did not report for {silent_s:.0f} s")
        self._write_files()

    def close(self) -> None:
        """End the timeline; no part runs any more, and no engine is listed."""
        self._parts = {name: replace(part, state="ended", url="", pid=0) for name, part in self._parts.items()}
        self._is_new = True
        self._write_files()
        for name in self._lanes:
            self._timeline.end_lane(name, 0)
        self._timeline.close()

    def _lose(self, part: PartState, reason: str) -> None:
        self._parts[part.name] = replace(part, state="lost", url="")
        self.note(make_event(part.name, part.node, "lost", reason, time_s=self._clock()))
        self._show_life(self._parts[part.name])

    def _note_node(self, name: str, what: str) -> None:
        self.note(make_event("", name, what, time_s=self._clock()))
        self._show(f"node {name}", what == "joined")

    def _count(self, event: ClusterEvent) -> None:
        self._seen.add(event.number)
        if event.what in ("restart", "lost"):
            self._restarts[event.part] = self._restarts.get(event.part, 0) + 1
            self._reasons[event.part] = event.reason

    def _remember(self, event: ClusterEvent) -> None:
        """Learn from the log what a registry before this one knew, since the run began."""
        self._count(event)
        self._is_new = event.what == "begin"
        lane = event.part or f"node {event.node}"
        if event.what in ("joined", "serves"):
            self._lanes[lane] = None
        elif event.what in ("died", "lost", "restart"):
            self._lanes.pop(lane, None)
        if self._is_new:
            self._nodes.clear()
            self._lanes.clear()
            self._parts = {
                name: PartState(name=name, kind=each.kind, node="", state="waits") for name, each in self._parts.items()
            }
        elif event.what == "joined":
            self._nodes[event.node] = event.time_s
        elif event.what == "died":
            self._nodes.pop(event.node, None)
        elif event.part in self._parts and event.node:
            self._parts[event.part] = replace(self._parts[event.part], node=event.node, state="starts")
            self._heard_s[event.part] = self._clock()

    def _show_life(self, state: PartState) -> None:
        self._show(state.name, state.state in ("serves", "trains"), node=state.node)

    def _show(self, name: str, lives: bool, **values: Any) -> None:
        if lives and name not in self._lanes:
            self._lanes[name] = None
            self._timeline.begin_lane(name, 0, **values)
        elif not lives and name in self._lanes:
            del self._lanes[name]
            self._timeline.end_lane(name, 0)

    def _write_files(self) -> None:
        now_s = self._clock()
        urls = [part.url for part in self._parts.values() if part.kind is Kind.ENGINE and part.url]
        if self._is_new or now_s - self._started_s > _LISTEN_S:
            _write(self._folder / ENGINES, "".join(f"{url}\n" for url in urls))
        versions = [part.version for part in self._parts.values() if part.url and part.kind is Kind.ENGINE]
        state = {
            "time_s": now_s,
            "pid": os.getpid(),
            "nodes": [{"name": name, "since_s": since_s} for name, since_s in self._nodes.items()],
            "parts": [
                {**asdict(part), "restarts": self._restarts.get(name, 0), "reason": self._reasons.get(name, "")}
                for name, part in self._parts.items()
            ],
            "versions": {str(each): versions.count(each) for each in sorted({v for v in versions if v is not None})},
            "gang": {"restarts": self._restarts.get("trainers", 0), "reason": self._reasons.get("trainers", "")},
        }
        _write(self._folder / STATE, json.dumps(state))


def make_event(part: str, node: str, what: str, reason: str = "", *, time_s: float | None = None) -> ClusterEvent:
    """An event, by default of now."""
    time_s = time.time() if time_s is None else time_s
    return ClusterEvent(number=os.urandom(8).hex(), time_s=time_s, part=part, node=node, what=what, reason=reason)


def _write(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def write_event(path: Path, event: ClusterEvent) -> None:
    """Write an event at the end of a log, on a line of its own also behind one that was never finished."""
    with path.open("a+b") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 1))
        begin = b"" if log.read(1) in (b"", b"\n") else b"\n"
        log.write(begin + json.dumps(asdict(event)).encode() + b"\n")


def read_events(path: Path) -> Sequence[ClusterEvent]:
    """The events in a log; lines that are not whole are left out."""
    lines = path.read_bytes().splitlines() if path.exists() else ()
    return [event for line in lines if (event := parse_event(line)) is not None]


def parse_event(line: bytes | str) -> ClusterEvent | None:
    """Read a line of a log; None if it is not whole, because the disk was full or its writer was killed."""
    try:
        return ClusterEvent(**json.loads(line))
    except (ValueError, TypeError):
        return None


def format_event(event: ClusterEvent) -> str:
    """An event in one line."""
    when = time.strftime("%H:%M:%S", time.localtime(event.time_s))
    node = f" on {event.node}" if event.part and event.node else ""
    reason = f": {event.reason}" if event.reason else ""
    return f"[{when}] {event.part or f'node {event.node}'} {event.what}{node}{reason}"
