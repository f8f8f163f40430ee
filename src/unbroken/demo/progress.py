"""What the terminal shows while the demo runs, and the table at the end."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from unbroken.demo.result import DemoResult


class Display:
    """One progress bar per stage; where output is not a terminal, one line as each stage ends."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._progress = Progress(
            TextColumn("{task.description:<32}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[note]:<24}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
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
        """Show how far a stage is; a stage begins when it is first named and ends the one before it."""
        if stage not in self._stages:
            self._end_stage()
            self._stages[stage] = self._progress.add_task(stage, total=1.0, note=note)
        self._note = note or self._note
        self._progress.update(self._stages[stage], completed=share_done, note=self._note)

    def show(self, result: DemoResult) -> None:
        """Print the table of what was found."""
        table = Table(title="the same rollouts as sampled, and through decode, render, retokenise")
        for column in ("pipeline", "rollouts", "other ids", "off by > 20 %", "k3", "max diff"):
            table.add_column(column, justify="left" if column == "pipeline" else "right", no_wrap=True)
        rows = [("exact (ours)", result.num_compared, result.exact.share_differ, result.exact.mismatch)]
        for style, row in result.retokenized.items():
            rows.append((f"usual, {style} JSON", row.num_rollouts, row.share_differ, row.mismatch))
        for name, count, share, found in rows:
            off, k3, max_abs = f"{found.share_off_20pct:.1%}", f"{found.k3:.1e}", f"{found.max_abs:.1e}"
            table.add_row(name, str(count), f"{share:.1%}", off, k3, max_abs)
        self._console.print(table)
        self._console.print(result.honest_sentence)
        self._console.print(
            f"[bold]success at temperature 1: {result.success_before:.2f} -> {result.success_after:.2f}[/bold] "
            f"in {result.steps} GRPO steps, {result.rollouts:,} rollouts, {result.seconds:.0f} s"
        )

    def _end_stage(self) -> None:
        if not self._stages:
            return
        stage, task = list(self._stages.items())[-1]
        self._progress.update(task, completed=1.0)
        if not self._console.is_terminal:
            self._console.print(f"{stage}: done {self._note}")
        self._note = ""
