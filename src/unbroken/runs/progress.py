"""What a terminal shows of a run: a bar for each stage, or lines where output is no terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from unbroken.training.metrics.writer import Metrics


class Stages:
    """One progress bar per stage; where output is not a terminal, one line as each stage ends."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
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
        """Show how far a stage is; a stage begins when it is first named and ends the one before it."""
        if stage not in self._stages:
            self._end_stage()
            self._stages[stage] = self._progress.add_task(stage, total=1.0, note=note)
        self._note = note or self._note
        self._progress.update(self._stages[stage], completed=share_done, note=self._note)

    def _end_stage(self) -> None:
        if not self._stages:
            return
        stage, task = list(self._stages.items())[-1]
        self._progress.update(task, completed=1.0)
        if not self.console.is_terminal:
            self.console.print(f"{stage}: done {self._note}")
        self._note = ""


class StepDisplay(Stages):
    """The stages of a run; of its training, a line for each step where output is no terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        """`quiet` shows nothing: of several processes, one is enough."""
        super().__init__(Console(quiet=quiet))

    def step(self, step: int, metrics: Metrics, *, num_steps: int) -> None:
        """Show a step that is done."""
        numbers = (("reward", "reward/mean"), ("mismatch k3", "mismatch/k3"), ("s", "seconds/step"))
        told = [f"{name} {value:.3g}" for name, key in numbers if (value := metrics.get(key)) is not None]
        note = f"step {step + 1}/{num_steps}  {'  '.join(told)}"
        self.update("train", (step + 1) / num_steps, note)
        if not self.console.is_terminal:
            self.console.print(note)

    def tell(self, name: str, value: float | None) -> None:
        """Print a number that was measured, if it was."""
        if value is not None:
            self.console.print(f"{name} {value:.3f}")
