"""A run in MLflow, always by its id: in another thread, MLflow's own functions log to a run that they make there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def find(path: Path) -> str | None:
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


def select_new(run_id: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the run does not have: MLflow refuses another value, such as more steps."""
    import mlflow

    known = mlflow.get_run(run_id).data.params
    named = {clean_name(name): value for name, value in settings.items()}
    return {name: value for name, value in named.items() if name not in known}


def log(run_id: str, step: int, values: Mapping[str, float]) -> None:
    """Log the numbers of a step."""
    import mlflow

    mlflow.log_metrics({clean_name(name): value for name, value in values.items()}, step=step, run_id=run_id)


def log_table(run_id: str, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Log a table as an artifact of its own for each step."""
    import mlflow

    data = {column: [row[k] for row in rows] for k, column in enumerate(columns)}
    mlflow.log_table(data, artifact_file=f"{name}/step-{step:08}.json", run_id=run_id)


def clean_name(name: str) -> str:
    """A name as MLflow takes it: of other characters it refuses the whole step."""
    return re.sub(r"[^\w\-. :/]", "_", name)
