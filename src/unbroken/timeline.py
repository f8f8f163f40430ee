"""A timeline of a process in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

    [
    {"ph": "B", "name": "step 3", "ts": 1790000000000000, "pid": 1, "tid": 1, "args": {"version": 3}},
    {"ph": "E", "ts": 1790000001500000, "pid": 1, "tid": 1, "args": {}}
    ]

Each event is written at once, so the file of a killed process has all but the last `]`, which the format does not need.
The format: "Trace Event Format" of the Chromium project, JSON array form; `ts` is in microseconds, here since 1970.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import Any

_END = b"\n]\n"
_logger = logging.getLogger(__name__)


class Track(Enum):
    """A row of slices. The slices of one track are nested, or one after the other."""

    TRAINER = (1, "trainer")
    PUBLISHER = (2, "publisher")
    SAMPLER = (3, "sampler")
    EVALUATION = (4, "evaluation")

    def __init__(self, number: int, label: str) -> None:
        self.number = number
        self.label = label


class TraceFile:
    """A file of events that never has more than `max_bytes`, together with the file before it.

    At half of that it is renamed to `NAME.previous.json`, in place of an earlier one, and begins anew: the newest
    events are kept. A file that is there already is continued. A disk that fails ends the file, not the run.
    """

    def __init__(self, path: Path, *, max_bytes: int | None) -> None:
        """Open the file; None is no bound."""
        self._path = path
        self._max_bytes = max_bytes
        self._head: list[Mapping[str, Any]] = []
        self._file: FileIO | None = None
        self._size = 0
        self.last_event: Mapping[str, Any] | None = None
        """The last event of the file that is continued."""
        with self._report_failure():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self._size, self.last_event = _find_end(path.read_bytes())
                os.truncate(path, self._size)
            self._file = path.open("ab", buffering=0)

    def write(self, event: Mapping[str, Any], *, is_head: bool = False) -> None:
        """Write an event; those of the head are repeated in each file."""
        if is_head:
            self._head.append(event)
        with self._report_failure():
            self._append(event)
            if self._max_bytes is not None and self._size > self._max_bytes // 2:
                self._begin_anew()

    def close(self) -> None:
        """End the file. Idempotent."""
        with self._report_failure():
            if self._file is not None:
                self._file.write(_END if self._size else b"[" + _END)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, event: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        line = (b",\n" if self._size else b"[\n") + json.dumps(event).encode()
        self._file.write(line)
        self._size += len(line)

    def _begin_anew(self) -> None:
        if self._file is None:
            return
        self._file.write(_END)
        self._file.close()
        self._path.replace(self._path.with_suffix(".previous.json"))
        self._file, self._size = self._path.open("ab", buffering=0), 0
        for event in self._head:
            self._append(event)

    @contextmanager
    def _report_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _logger.warning("the timeline %s ends here: %s", self._path, error)
            if self._file is not None:
                self._file.close()
            self._file = None


class Timeline:
    """Slices and counters of a process. It is used in one thread; without a file it does nothing."""

    def __init__(
        self,
        file: TraceFile | None = None,
        *,
        name: str = "",
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
        origin_s: float | None = None,
    ) -> None:
        """`name` is the process's. `clock` is in seconds, and its 0 is `origin_s` after the year 1970 began.

        Each start of a process that continues a file has its own number there: what a killed one has not ended
        stays apart.
        """
        self._file = file
        self._clock = clock
        self._origin_s = time.time() - clock() if origin_s is None else origin_s
        last = None if file is None else file.last_event
        self._pid = 1000 * rank + 1 if last is None else int(last["pid"]) + 1
        self._name_rows(name, rank)

    def begin(self, track: Track, name: str, *, at_s: float | None = None, **values: Any) -> None:
        """Begin a slice; `at_s` is on the clock, by default now."""
        self._write("B", at_s, name=name, tid=track.number, args=values)

    def end(self, track: Track, *, at_s: float | None = None, **values: Any) -> None:
        """End the slice of the track that began last."""
        self._write("E", at_s, tid=track.number, args=values)

    @contextmanager
    def span(self, name: str, *, track: Track = Track.TRAINER, **values: Any) -> Iterator[None]:
        """A slice around the block."""
        self.begin(track, name, **values)
        try:
            yield
        finally:
            self.end(track)

    def begin_lane(self, name: str, number: int, *, at_s: float | None = None, **values: Any) -> None:
        """Begin a slice that may overlap others of its name; `number` tells them apart."""
        self._write("b", at_s, name=name, cat=name, id=str(number), tid=0, args={"number": number, **values})

    def end_lane(self, name: str, number: int, *, at_s: float | None = None, **values: Any) -> None:
        """End such a slice."""
        self._write("e", at_s, name=name, cat=name, id=str(number), tid=0, args=values)

    def count(self, name: str, *, at_s: float | None = None, **values: float) -> None:
        """Show numbers as curves; each keeps its value until the next call."""
        self._write("C", at_s, name=name, tid=0, args=values)

    def close(self) -> None:
        """End the file. Idempotent."""
        if self._file is not None:
            self._file.close()

    def _write(self, phase: str, at_s: float | None, *, args: Mapping[str, Any], **fields: Any) -> None:
        if self._file is None:
            return
        moment = self._origin_s + (self._clock() if at_s is None else at_s)
        self._file.write({"ph": phase, "ts": round(moment * 1e6), "pid": self._pid, **fields, "args": args})

    def _name_rows(self, name: str, rank: int) -> None:
        if self._file is None:
            return
        names = [("process_name", 0, {"name": name}), ("process_sort_index", 0, {"sort_index": rank})]
        names += [("thread_name", track.number, {"name": track.label}) for track in Track]
        for kind, row, args in names:
            event = {"ph": "M", "name": kind, "pid": self._pid, "tid": row, "args": args}
            self._file.write(event, is_head=True)


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """The events of a file, also of one that was not ended or whose last event was cut."""
    data = path.read_bytes()
    size, _ = _find_end(data)
    events: list[dict[str, Any]] = json.loads(data[:size] + b"]") if size else []
    return events


def _find_end(data: bytes) -> tuple[int, Mapping[str, Any] | None]:
    """The number of bytes up to the last whole event, and that event."""
    end = len(data)
    while end > 0:
        start = data.rfind(b"\n", 0, end) + 1
        line = data[start:end].rstrip(b",")
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict):
            return start + len(line), event
        end = start - 1
    return 0, None
