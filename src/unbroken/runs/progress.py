"""The progress of a run in the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unbroken.training.metrics.writer import Metrics

MAX_SHOWN = 600
"""Characters of a completion that are shown."""


class RunProgress:
    """Shows a line for each step of training, and tables of completions."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._began_s = 0.0
        """When the first step that was shown began, on the monotonic clock."""
        self._num_shown = 0

    def show_step(self, step: int, metrics: Metrics, *, num_steps: int) -> None:
        """Show a finished step on a line: its number, as in metrics and viewer, and how many are made."""
        numbers = (("reward", "reward/mean"), ("mismatch k3", "mismatch/k3"), ("s", "seconds/step"))
        parts = [f"{name} {value:.3g}" for name, key in numbers if (value := metrics.get(key)) is not None]
        for name, status in (("time-outs", "timeout"), ("failures", "failed")):
            if count := metrics.get(f"counters/status/{status}"):
                parts.append(f"{name} {count}")
        now = time.monotonic()
        self._began_s = self._began_s or now - (metrics.get("seconds/step") or 0.0)
        self._num_shown += 1
        if left := num_steps - step - 1:
            parts.append(f"left {timedelta(seconds=round((now - self._began_s) / self._num_shown * left))}")
        self.console.print(f"step {step} ({step + 1} of {num_steps})  {'  '.join(parts)}", soft_wrap=True)

    def show_completions(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table of completions; long texts are cut in the middle."""
        table = Table(title=f"step {step}", show_lines=True, title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold", no_wrap=False)
        for row in rows:
            table.add_row(*(Text(_format_cell(cell)) for cell in row))  # markup in a completion is text
        self.console.print(table)


def _format_cell(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.3g}"
    text = str(cell)
    half = MAX_SHOWN // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]} … {text[-half:]}"
