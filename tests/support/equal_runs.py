"""Whether a run that was killed and started again equals one that was not, byte for byte but for times and places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unbroken.runs.records.files import find_records, read_records

TIMES = ("seconds/", "tokens_per_s/", "idle/", "memory/")


def find_differences(output: Path, whole: Path) -> list[str]:
    """The metrics, and the files of rollouts, of checkpoints that are kept and of the final model, that differ."""
    ours, theirs = _read_run(output), _read_run(whole)
    names = {**theirs, **ours}
    return [name for name in names if name not in ours or name not in theirs or ours[name] != theirs[name]]


def _read_run(output: Path) -> dict[str, Any]:
    lines = enumerate(read_metrics(output))
    metrics = {f"metrics.jsonl:{number} {name}": value for number, line in lines for name, value in line.items()}
    rollouts = {f"rollouts of step {step}": value for (step, _), value in read_rollouts(output).items()}
    final = {f"final/{name}": value for name, value in read_model(output / "final").items()}
    return {**metrics, **rollouts, **_read_checkpoints(output / "checkpoints"), **final}


def read_metrics(output: Path) -> list[dict[str, Any]]:
    lines = (output / "metrics" / "metrics.jsonl").read_text().splitlines()
    return [drop_times(json.loads(line)) for line in lines]


def read_rollouts(output: Path) -> dict[tuple[int, int], Any]:
    return {key: list(map(drop_times, read_records(path))) for key, path in find_records(output / "rollouts").items()}


def _read_checkpoints(folder: Path) -> dict[str, Any]:
    """Weights, optimizers, generators and numbers, by the names of their files.

    Torch draws an id for each `.metadata`, whose SHA-256 is among the `files` of a state.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = f"checkpoints/{path.relative_to(folder)}"
        if path.name == "state.json":
            found[name] = drop_times(json.loads(path.read_text()) | {"files": None})
        elif path.is_file() and path.name != ".metadata":
            found[name] = path.read_bytes()
    assert any(name.endswith(".distcp") for name in found), f"no tensors in {folder}"
    return found


def read_model(folder: Path) -> dict[str, bytes]:
    """The files but for `unbroken.json`, which names the folder of the model that it was trained from."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "unbroken.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def drop_times(value: Any) -> Any:
    """A part of a record without seconds, and without the path of the model, which may lie in the run's folder."""
    if isinstance(value, dict):
        kept = (name for name in value if not name.startswith(TIMES) and not name.endswith("_s") and name != "model")
        return {name: drop_times(value[name]) for name in kept}
    return [drop_times(each) for each in value] if isinstance(value, list) else value
