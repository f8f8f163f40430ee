"""The progress of a run in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from unbroken.training.metrics.writer import Metrics

MAX_SHOWN = 600
"""Characters of a completion that are shown."""


class StageProgress:
    """A progress bar for each stage; where the output is not a terminal, one line at the end of each stage."""

    def __init__(self, *, quiet: bool = False) -> None:
        """With `quiet`, nothing is shown: of several processes, only one should show progress."""
        self.console = Console(quiet=quiet)
        self._progress = Progress(
            TextColumn("{task.description:<32}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[note]:<24}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._stages: dict[str, TaskID] = {}
        self._note = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_exception: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._end_stage()
        self._progress.stop()

    def update(self, stage: str, share_done: float, note: str = "") -> None:
        """Show how far a stage is. A stage begins with its first update, which ends the stage before it."""
        if stage not in self._stages:
            self._end_stage()
            self._stages[stage] = self._progress.add_task(stage, total=1.0, note=note)
        self._note = note or self._note
        self._progress.update(self._stages[stage], completed=share_done, note=self._note)

    def show_step(self, step: int, metrics: Metrics, *, num_steps: int) -> None:
        """Show a finished training step; where the output is not a terminal, on its own line."""
        numbers = (("reward", "reward/mean"), ("mismatch k3", "mismatch/k3"), ("s", "seconds/step"))
        parts = [f"{name} {value:.3g}" for name, key in numbers if (value := metrics.get(key)) is not None]
        note = f"step {step + 1}/{num_steps}  {'  '.join(parts)}"
        self.update("train", (step + 1) / num_steps, note)
        if not self.console.is_terminal:
            self.console.print(note)

    def show_completions(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table of completions; long texts are cut in the middle."""
        table = Table(title=f"step {step + 1}", show_lines=True, title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold", no_wrap=False)
        for row in rows:
            table.add_row(*(Text(_format_cell(cell)) for cell in row))  # markup in a completion is text
        self.console.print(table)

    def _end_stage(self) -> None:
        if not self._stages:
            return
        stage, task = list(self._stages.items())[-1]
        self._progress.update(task, completed=1.0)
        if not self.console.is_terminal:
            self.console.print(f"{stage}: done {self._note}")
        self._note = ""


def _format_cell(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.3g}"
    text = str(cell)
    half = MAX_SHOWN // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]} … {text[-half:]}"
