"""Writes the metrics of each step into a JSONL file and to trackers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from unbroken.counters import Counters, Event
from unbroken.errors import InvalidInputError, MetricsError
from unbroken.training.config import TrackerConfig
from unbroken.training.metrics.trackers import Trackers

Metrics: TypeAlias = Mapping[str, float | None]
"""Names to numbers; None if there is no data."""

_JSONL = "metrics.jsonl"
_VIEWER = "viewer"


class MetricsWriter:
    """Appends to `metrics.jsonl`, flushed after each step, and logs to trackers. A context manager."""

    def __init__(
        self,
        directory: Path,
        *,
        trackers: TrackerConfig | None = None,
        settings: Mapping[str, Any] | None = None,
        viewer: str | None = None,
    ) -> None:
        """Write into `directory`. Trackers (default: TensorBoard) also show `settings`, the run's config, and `viewer`.

        `viewer` is the command that shows what trackers cannot: rollouts, token by token.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        shown = {**(settings or {}), **({} if viewer is None else {_VIEWER: viewer})}
        self._trackers = Trackers(trackers or TrackerConfig(), directory, shown)
        if viewer is not None and not (directory / _JSONL).exists():
            self._trackers.log_text(_VIEWER, f"`{viewer}`")
        self._jsonl = (directory / _JSONL).open("ab", buffering=0)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def write(self, step: int, metrics: Metrics) -> None:
        """Write one step. None becomes null in the JSONL file and is not logged to trackers.

        Raises:
            InvalidInputError: a value is NaN or infinite; nothing was written.
            MetricsError: the disk is full or fails. A half-written line is removed when the run continues.
        """
        for name, value in metrics.items():
            if value is not None and not math.isfinite(value):
                raise InvalidInputError(f"metric {name} is {value} at step {step}: pass None if there is no number")
        try:
            self._append(json.dumps({"step": step, **metrics}) + "\n")
            self._trackers.log(step, {name: value for name, value in metrics.items() if value is not None})
        except OSError as error:
            raise MetricsError(
                f"the metrics of step {step} cannot be written to {self._directory}: {error.strerror or error}. Free "
                "space and start the run again: with checkpoints it continues after the newest"
            ) from error

    def log_evaluation(self, num_steps: int, values: Mapping[str, float]) -> None:
        """Log the numbers of an evaluation after `num_steps` steps to the trackers; they are in no line of the file."""
        self._trackers.log(num_steps, values)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table to the trackers that have tables."""
        self._trackers.log_table(step, name, columns, rows)

    def cut(self, first_step: int) -> None:
        """Remove the metrics of `first_step` and later steps, and a half-written last line.

        Raises:
            InvalidInputError: another line is not the metrics of a step.
        """
        self._jsonl.truncate(_find_end(self._directory / _JSONL, first_step))
        self._trackers.cut(first_step)

    def close(self) -> None:
        """Close the file and end the trackers. Idempotent."""
        self._jsonl.close()
        self._trackers.close()

    def _append(self, line: str) -> None:
        data = line.encode()
        while data:  # a disk that becomes full writes a part first
            data = data[self._jsonl.write(data) :]
        os.fsync(self._jsonl.fileno())


def _find_end(path: Path, first_step: int) -> int:
    """The number of bytes of a JSONL file before the first line of `first_step` or a later step."""
    end = 0
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise InvalidInputError(f"line {number} of {path} must be the metrics of a step, got {line!r}") from error
        if step >= first_step or not line.endswith(b"\n"):
            break
        end += len(line)
    return end


def counter_metrics(counters: Counters) -> Metrics:
    """Each event's total, zero included, and each count by reason (I8)."""
    totals = {f"counters/{event.value}": counters.total(event) for event in Event}
    return totals | {f"counters/{key}": count for key, count in counters.as_dict().items()}
