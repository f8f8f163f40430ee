"""A run in a process of its own, seen by its files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.forks import ForkedPython
from unbroken.runs.records.files import find_records, read_records

LONGEST_S = 150.0


class WatchedRun:
    """A command that writes a run into the folder `output`, and what it says into a log beside it."""

    def __init__(self, output: Path, *words: str | Path, **options: Any) -> None:
        """Start `unbroken` with these words, with options of `ForkedPython`."""
        self.output = output
        self._log = output.with_name(f"{output.name}.log")
        self.process = ForkedPython("unbroken", *words, output=self._log, **options)

    def text(self) -> str:
        return self._log.read_text()

    def steps(self) -> list[dict[str, Any]]:
        return read_lines(self.output / "metrics" / "metrics.jsonl")

    def problems(self) -> list[int]:
        return read_problems(self.output)

    def wait_until(self, holds: Callable[[], Any]) -> float:
        """Returns how long it took."""
        began_s = time.monotonic()
        while not holds():
            assert time.monotonic() - began_s < LONGEST_S, self.explain()
            assert self.process.poll() is None, self.explain()
            time.sleep(0.02)
        return time.monotonic() - began_s

    def wait_for_steps(self, number: int, *, more: bool = False) -> float:
        """Wait until there are so many, or so many more than now; returns how long it took."""
        number += len(self.steps()) if more else 0
        return self.wait_until(lambda: len(self.steps()) >= number)

    def explain(self) -> str:
        return self.text()[-3000:]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Those that are whole."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def read_problems(output: Path) -> list[int]:
    """Those of each step of a run, in the order of the steps."""
    groups = [
        {record["group"] for record in read_records(path) if record["kind"] == "trajectory"}
        for _, path in sorted(find_records(output / "rollouts").items())
    ]
    return [int(name.rpartition("-")[2]) for of_step in groups for name in sorted(of_step)]
