"""What a run does at each step, and what it shows of it in the terminal."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unbroken.progress import begin
from unbroken.runs.config import RunConfig
from unbroken.runs.diagnosis.diary import Diary
from unbroken.runs.engines import RunEngine
from unbroken.runs.evaluation.background import BackgroundEvaluations
from unbroken.runs.evaluation.schedule import Evaluations, format_parts
from unbroken.runs.export.kept import KeptModels
from unbroken.runs.policy_check import PolicyCheck
from unbroken.runs.profiler import StepProfiler
from unbroken.runs.records.recorder import Recorder, make_table
from unbroken.training.metrics.writer import Metrics, MetricsWriter
from unbroken.training.observer import RunObserver, StepRollouts
from unbroken.training.trainer import Trainer

_SHOWN = (
    ("reward", "reward/mean"),
    ("supervised loss", "supervised/loss"),
    ("mismatch k3", "mismatch/k3"),
    ("s", "seconds/step"),
)
"""What the line of a step begins with, and the metrics."""
_ROUNDING = 1e-4
"""A mismatch below is that of float32's rounding, and is in the metrics only."""
MAX_SHOWN = 600
"""Characters of a completion that are shown."""


class RunProgress:
    """Shows a line for each step of training, and tables of completions."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._began_s = 0.0
        """When the first step that was shown began, or the first one that samples, on the monotonic clock."""
        self.num_shown = 0
        """Steps since then."""

    def show_step(self, step: int, metrics: Metrics, *, num_steps: int, num_supervised: int = 0) -> None:
        """Show a finished step on a line: its number, as in metrics and viewer, and how many are made.

        Its time says nothing of steps of the other kind: supervised ones, with which the run begins, sample nothing.
        """
        parts = _describe_numbers(metrics)
        for name, status in (("time-outs", "timeout"), ("failures", "failed")):
            if count := metrics.get(f"counters/status/{status}"):
                parts.append(f"{name} {count}")
        if metrics.get("train/num_rows") == 0:
            parts.append("nothing to train on")
        if step == num_supervised:
            self._began_s, self.num_shown = 0.0, 0
        self._began_s = self._began_s or time.monotonic() - (metrics.get("seconds/step") or 0.0)
        self.num_shown += 1
        parts += self._estimate_left(step, num_steps=num_steps, num_supervised=num_supervised)
        self.console.print(f"step {step} ({step + 1} of {num_steps})  {'  '.join(parts)}", soft_wrap=True)

    def _estimate_left(self, step: int, *, num_steps: int, num_supervised: int) -> Sequence[str]:
        """The time that the other steps of the same kind take, in words; nothing for none."""
        is_warm_start = step < num_supervised < num_steps
        num_left = (num_supervised if is_warm_start else num_steps) - step - 1
        seconds = round((time.monotonic() - self._began_s) / self.num_shown * num_left)
        return [f"left {timedelta(seconds=seconds)}{' of the warm start' if is_warm_start else ''}"] if num_left else []

    def show_end(self, output: Path, *, model: Path) -> None:
        """Say where the trained model is, and how to look at the run."""
        for line in (f"model in {model}", f"look at it: unbroken view {shlex.quote(str(output))}"):
            self.console.print(line, soft_wrap=True, highlight=False)

    def show_completions(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table of completions; long texts are cut in the middle."""
        table = Table(title=f"step {step}", show_lines=True, title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold", no_wrap=False)
        for row in rows:
            table.add_row(*(Text(_format_cell(cell)) for cell in row))  # markup in a completion is text
        self.console.print(table)


class TrainingObserver(RunObserver):
    """Records rollouts, shows and logs metrics, writes models, evaluates and profiles, where the config says so."""

    def __init__(
        self,
        *,
        config: RunConfig,
        trainer: Trainer,
        engine: RunEngine,
        check: PolicyCheck,
        models: KeptModels,
        evaluations: Evaluations,
        background: BackgroundEvaluations | None,
        recorder: Recorder,
        progress: RunProgress,
        metrics: MetricsWriter | None,
        profiler: StepProfiler,
        num_processes: int = 1,
    ) -> None:
        """With `loop.max_staleness`, `background` is there: it evaluates while steps are made."""
        self.before_update = engine.before_update
        self._config = config
        self._trainer = trainer
        self._check = check
        self._models = models
        self._evaluations = evaluations
        self._background = background
        self._recorder = recorder
        self._progress = progress
        self._metrics = metrics
        self._profiler = profiler
        self._num_processes = num_processes
        self._diary: Diary | None = None
        """In the first process."""
        if metrics is not None:
            self._diary = Diary(
                config.output, lambda text: progress.console.print(text, soft_wrap=True, highlight=False, markup=False)
            )

    @property
    def _num_supervised(self) -> int:
        """Steps of the warm start, with which the run begins."""
        return 0 if self._config.warm_start is None else self._config.warm_start.steps

    def around_step(self, step: int) -> AbstractContextManager[None]:
        """Profile the step if the config says so."""
        rollouts = self._config.rollouts
        if step < self._num_supervised:
            self._begin(f"step {step}: supervised rows")
            return self._profiler.step(step)
        total = rollouts.problems_per_step * rollouts.group_size // self._num_processes
        self._begin(f"step {step}: sampling", total=total, unit="rollouts")
        return self._profiler.step(step)

    def _begin(self, what: str, *, total: int | None = None, unit: str = "") -> None:
        """Begin a part of a step. How far the first one is, is said often; later ones know the time that is left."""
        begin(what, total=total, unit=unit, is_often=self._progress.num_shown == 0)

    async def on_resume(self) -> None:
        """Compare the engine's policy with the trainer's, now that it has its weights."""
        self._progress.console.print(await self._check.run(), soft_wrap=True, highlight=False)

    async def on_rollouts(self, rollouts: StepRollouts) -> None:
        """Record the step's rollouts, and show and log a table of some."""
        await self._recorder.record(rollouts)
        if self._diary is not None:
            await asyncio.to_thread(self._diary.see_rollouts, rollouts.groups)
        with self._trainer.fail_together():
            if (number := self._config.log_completions) > 0 and self._metrics is not None:
                columns, rows = make_table(rollouts, self._trainer, number)
                self._progress.show_completions(rollouts.step, columns, rows)
                self._metrics.log_table(rollouts.step, "completions", columns, rows)
        num_rows = sum(map(len, map(self._trainer.objective.get_rows, rollouts.units)))
        total = num_rows * self._config.trainer.num_iterations
        self._begin(f"step {rollouts.step}: training", total=total, unit="rows")

    async def settle(self) -> None:
        """Wait for the file of the last step's rollouts: a run that continues after a step has those of all steps."""
        await self._recorder.finish()

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Show the step's metrics, and log the evaluations so far."""
        num_steps = self._config.loop.num_steps
        self._progress.show_step(step, metrics, num_steps=num_steps, num_supervised=self._num_supervised)
        self._evaluations.log()
        if self._diary is not None:
            self._diary.see_step(metrics, is_last=step + 1 == num_steps)

    def warn(self, words: str) -> None:
        """Say nothing: the diagnosis does, once and with the cause, and the step's line has the numbers."""

    async def after_step(self, num_steps: int) -> None:
        """Write the model and evaluate it, where that is due."""
        await asyncio.to_thread(self._models.write_step, num_steps)
        if self._background is not None:
            await self._background.after_step(num_steps)
        elif self.needs_engine(num_steps):
            await self._evaluations.evaluate(num_steps, f"after {num_steps} steps")

    def needs_engine(self, num_steps: int) -> bool:
        """Whether an evaluation on the training's engine begins after this number of steps."""
        if self._background is not None:
            return self._background.is_due(num_steps)
        return self._evaluations.is_due(num_steps, last=self._config.loop.num_steps)


def _describe_numbers(metrics: Metrics) -> list[str]:
    """The numbers of a step's line: the reward with its parts, its time, and what is not as it should be."""
    shown = {name: f"{value:.3g}" for name, key in _SHOWN if (value := metrics.get(key)) is not None}
    if "reward" in shown:
        shown["reward"] += format_parts(metrics, r"reward/(.+)_mean")
    if (metrics.get("mismatch/k3") or 0.0) < _ROUNDING:
        shown.pop("mismatch k3", None)
    return [f"{name} {text}" for name, text in shown.items()]


def _format_cell(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.3g}"
    text = str(cell)
    half = MAX_SHOWN // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]} … {text[-half:]}"
