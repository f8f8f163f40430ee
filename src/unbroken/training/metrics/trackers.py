"""Log metrics to TensorBoard, and to the other trackers that accelerate supports.

`Accelerator(log_with=...)` silently ignores trackers whose package is missing, so accelerate's tracker classes are used
directly; they need an existing `Accelerator`. TensorBoard is written without it, because accelerate's tracker cannot
remove the steps that a resumed run makes again.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from torch.utils.tensorboard import SummaryWriter

from unbroken.reports import ReportTable
from unbroken.training.config import Tracker, TrackerConfig

_MLFLOW_RUN = "mlflow_run_id"


class Trackers:
    """Open trackers. A resumed run continues in TensorBoard, W&B, MLflow and trackio; in others it is a new run."""

    def __init__(self, config: TrackerConfig, directory: Path, settings: Mapping[str, Any]) -> None:
        """Start the trackers. `settings` are the run's, in types that JSON can hold; not shown in TensorBoard."""
        self._config = config
        self._directory = directory
        self._tensorboard = SummaryWriter(str(directory)) if Tracker.TENSORBOARD in config.names else None
        self._others = [self._start(name) for name in config.names if name is not Tracker.TENSORBOARD]
        for tracker in self._others:
            if tracker.name == Tracker.MLFLOW:
                settings = _select_new_settings(tracker.tracker.info.run_id, settings)
            tracker.store_init_configuration(dict(settings))

    def log_text(self, name: str, text: str) -> None:
        """Show a text next to the curves of TensorBoard; others show texts of `settings`."""
        if self._tensorboard is not None:
            self._tensorboard.add_text(name, text, 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step."""
        for tracker in self._others:
            if tracker.name == Tracker.MLFLOW:
                _log_to_mlflow(tracker.tracker.info.run_id, step, values)
            else:
                tracker.log(dict(values), step=step)
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table to TensorBoard, as text, and to the trackers that have tables (W&B, MLflow, trackio, ClearML)."""
        cells = [list(row) for row in rows]
        for tracker in self._others:
            if tracker.name == Tracker.MLFLOW:
                _log_mlflow_table(tracker.tracker.info.run_id, step, name, columns, cells)
            elif tracker.name == Tracker.TRACKIO:
                _log_trackio_table(tracker, step, name, columns, cells)
            elif (log_table := getattr(tracker, "log_table", None)) is not None:
                log_table(name, columns=list(columns), data=cells, step=step)
        if self._tensorboard is not None:
            texts = [["" if cell is None else str(cell) for cell in row] for row in rows]
            self._tensorboard.add_text(name, ReportTable(columns=columns, rows=texts).to_markdown(), step)

    def cut(self, first_step: int) -> None:
        """Remove `first_step` and later steps from TensorBoard. Others cannot. W&B keeps the first values, which
        are equal; MLflow and trackio have both.
        """
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = SummaryWriter(str(self._directory), purge_step=first_step)

    def close(self) -> None:
        """End the trackers. Idempotent."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        while self._others:
            self._others.pop().finish()

    def _start(self, name: Tracker) -> GeneralTracker:
        kind = LOGGER_TYPE_TO_CLASS[name.value]
        folder = [str(self._directory)] if kind.requires_logging_directory else []
        tracker = kind(self._config.project, *folder, **self._options(name))
        tracker.start()
        if name is Tracker.MLFLOW:
            (self._directory / _MLFLOW_RUN).write_text(tracker.tracker.info.run_id, "utf-8")
        return tracker

    def _options(self, name: Tracker) -> dict[str, Any]:
        """The name of the run, and what makes a resumed run the same one."""
        run_name = self._config.run_name
        if name is Tracker.WANDB:
            return {"id": self._get_run_id(), "resume": "allow", "name": run_name, "dir": str(self._directory)}
        if name is Tracker.MLFLOW:
            return {"run_id": _find_mlflow_run(self._directory / _MLFLOW_RUN), "run_name": run_name}
        if name is Tracker.TRACKIO:  # runs are identified by their names
            return {"name": f"{run_name or 'run'}-{self._get_run_id()[:8]}", "resume": "allow"}
        return {}

    def _get_run_id(self) -> str:
        """The run's id, which a resumed run keeps."""
        path = self._directory / "run_id"
        if not path.exists():
            path.write_text(uuid.uuid4().hex, "utf-8")
        return path.read_text("utf-8")


def _log_trackio_table(
    tracker: GeneralTracker, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> None:
    import pandas
    import trackio

    tracker.log({name: trackio.Table(dataframe=pandas.DataFrame(rows, columns=list(columns)))}, step=step)


# A run in MLflow is always named by its id: in another thread, MLflow's own functions would log to a new run.


def _find_mlflow_run(path: Path) -> str | None:
    """The id in a file, if MLflow still has the run."""
    import mlflow

    if not path.exists():
        return None
    run_id = path.read_text("utf-8")
    try:
        mlflow.get_run(run_id)
    except mlflow.exceptions.MlflowException:
        return None
    return run_id


def _select_new_settings(run_id: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the run does not have: MLflow refuses another value, such as more steps."""
    import mlflow

    known = mlflow.get_run(run_id).data.params
    named = {clean_name(name): value for name, value in settings.items()}
    return {name: value for name, value in named.items() if name not in known}


def _log_to_mlflow(run_id: str, step: int, values: Mapping[str, float]) -> None:
    """Log the numbers of a step."""
    import mlflow

    mlflow.log_metrics({clean_name(name): value for name, value in values.items()}, step=step, run_id=run_id)


def _log_mlflow_table(run_id: str, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Log a table as a separate artifact for each step."""
    import mlflow

    data = {column: [row[k] for row in rows] for k, column in enumerate(columns)}
    mlflow.log_table(data, artifact_file=f"{name}/step-{step:08}.json", run_id=run_id)


def clean_name(name: str) -> str:
    """A name as MLflow takes it: of other characters it refuses the whole step."""
    return re.sub(r"[^\w\-. :/]", "_", name)
