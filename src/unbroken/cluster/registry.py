"""Which parts live where, what happened to them, and the files that say so.

cluster/engines.txt     URLs of the engines that serve: the trainers' `engine.urls_file`
cluster/log.jsonl       each event, with its reason, for ever
cluster/state.json      how it is now: for `unbroken cluster status` and `unbroken view`
timeline/cluster.json   the life of each node and part, for https://ui.perfetto.dev
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from unbroken.cluster.processes import Kind, PartState
from unbroken.timeline import Timeline, TraceFile

FOLDER = "cluster"
"""In the output of a run: logs, the key and the lists of a cluster."""
ENGINES, KEY, LOG, STATE = "engines.txt", "key", "log.jsonl", "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClusterEvent:
    """What happened to a part or a node."""

    time_s: float
    """Since 1970."""
    part: str
    node: str
    what: str
    """begin, start, serves, trains, restart, joined, died, end."""
    reason: str = ""

    def __str__(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.time_s))
        node = f" on {self.node}" if self.part and self.node else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"[{when}] {self.part or f'node {self.node}'} {self.what}{node}{reason}"


class Registry:
    """Knows all parts and nodes of a run, and writes the files. Events are also printed."""

    def __init__(self, output: Path, parts: Mapping[str, Kind], *, clock: Callable[[], float] = time.time) -> None:
        self._folder = output / FOLDER
        self._clock = clock
        self._parts = {name: PartState(name=name, kind=kind) for name, kind in parts.items()}
        self._nodes: dict[str, float] = {}
        """Since when each that lives is known."""
        self._restarts: dict[str, int] = {}
        self._reasons: dict[str, str] = {}
        """Of the last restart of each part; those of earlier commands count."""
        self._unwritten: list[_ClusterEvent] = []
        self._lanes: set[str] = set()
        """Nodes and parts whose life has begun in the timeline."""
        trace = TraceFile(output / "timeline" / "cluster.json", max_bytes=None)
        self._timeline = Timeline(trace, name="cluster", rank=900, clock=clock, origin_s=0.0)
        log = self._folder / LOG
        for line in log.read_bytes().splitlines() if log.exists() else ():
            with suppress(ValueError, TypeError, KeyError):  # not whole: the disk was full, or its writer was killed
                event = json.loads(line)
                self._count(event["part"], event["what"], event["reason"])

    def find_part(self, name: str) -> PartState:
        """How a part is."""
        return self._parts[name]

    def note(self, part: str, what: str, reason: str = "", *, node: str = "") -> None:
        """Tell of an event."""
        event = _ClusterEvent(time_s=self._clock(), part=part, node=node, what=what, reason=reason)
        print(event, flush=True)
        self._count(part, what, reason)
        self._unwritten.append(event)
        self._write_files()

    def update(self, part: PartState) -> None:
        """Take the state of a part; tells when it begins to serve."""
        before = self._parts[part.name]
        self._parts[part.name] = part
        if part.state == "serves" != before.state:
            self.note(part.name, "serves", f"at {part.url}" if part.url else "", node=part.node)
        self._show(part.name, part.state in ("serves", "trains"), node=part.node)

    def watch(self, nodes: Set[str]) -> None:
        """Compare the names of the nodes that live with those that were there; then write the files."""
        for name in sorted(nodes ^ self._nodes.keys()):
            if has_joined := name in nodes:
                self._nodes[name] = self._clock()
            else:
                del self._nodes[name]
            self.note("", "joined" if has_joined else "died", node=name)
            self._show(f"node {name}", has_joined)
        self._write_files()

    def close(self) -> None:
        """End the timeline; no part runs any more, and no engine is listed."""
        for part in list(self._parts.values()):
            self.update(replace(part, state="ended", url="", pid=0))
        for name in sorted(self._lanes):
            self._show(name, False)
        self._timeline.close()
        self._write_files()

    def _count(self, part: str, what: str, reason: str) -> None:
        if what == "restart":
            self._restarts[part] = self._restarts.get(part, 0) + 1
            self._reasons[part] = reason

    def _show(self, name: str, lives: bool, **values: Any) -> None:
        if lives and name not in self._lanes:
            self._lanes.add(name)
            self._timeline.begin_lane(name, 0, **values)
        elif not lives and name in self._lanes:
            self._lanes.remove(name)
            self._timeline.end_lane(name, 0)

    def _write_log(self) -> None:
        """Append events, each of which is forgotten once it is written: after a full disk the rest follows."""
        while self._unwritten:
            _append(self._folder / LOG, self._unwritten[0])
            del self._unwritten[0]

    def _write_files(self) -> None:
        engines = [part for part in self._parts.values() if part.kind is Kind.ENGINE and part.url]
        versions = [part.version for part in engines if part.version is not None]
        state = {
            "time_s": self._clock(),
            "pid": os.getpid(),
            "nodes": [{"name": name, "since_s": since_s} for name, since_s in self._nodes.items()],
            "parts": [asdict(part) | self._describe_restarts(name) for name, part in self._parts.items()],
            "versions": {str(each): versions.count(each) for each in sorted({*versions})},
            "gang": self._describe_restarts("trainers"),
        }
        try:
            self._write_log()
            _write(self._folder / ENGINES, "".join(f"{part.url}\n" for part in engines))
            _write(self._folder / STATE, json.dumps(state))
        except OSError as error:  # the disk is full, or the share is away for a while
            print(f"the registry cannot write: {error}", flush=True)

    def _describe_restarts(self, name: str) -> dict[str, Any]:
        return {"restarts": self._restarts.get(name, 0), "reason": self._reasons.get(name, "")}


def _append(path: Path, event: _ClusterEvent) -> None:
    """Write an event at the end of a log, on its own line also behind one that was never finished."""
    with path.open("a+b") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 1))
        begin = b"" if log.read(1) in (b"", b"\n") else b"\n"
        log.write(begin + json.dumps(asdict(event)).encode() + b"\n")


def _write(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)
