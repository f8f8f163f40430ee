"""Whether a run that was killed and started again equals one that was not, byte for byte but for times and places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unbroken.runs.records.files import find_records, read_records

TIMES = ("seconds/", "tokens_per_s/", "idle/", "memory/")


def assert_equal_runs(output: Path, whole: Path) -> None:
    """Compare metrics, rollouts, the checkpoints that are kept, and the final model."""
    assert read_metrics(output) == read_metrics(whole)
    assert read_rollouts(output) == read_rollouts(whole)
    ours, theirs = read_checkpoints(output), read_checkpoints(whole)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if ours[name] != theirs[name]] == []  # pytest would show the difference of bytes
    assert read_model(output / "final") == read_model(whole / "final")


def read_metrics(output: Path) -> list[dict[str, Any]]:
    lines = (output / "metrics" / "metrics.jsonl").read_text().splitlines()
    return [drop_times(json.loads(line)) for line in lines]


def read_rollouts(output: Path) -> dict[tuple[int, int], Any]:
    return {key: list(map(drop_times, read_records(path))) for key, path in find_records(output / "rollouts").items()}


def read_checkpoints(output: Path) -> dict[str, Any]:
    """Weights, optimizers, generators and numbers, by the names of their files.

    Torch draws an id for each `.metadata`, which `files` of a state has the SHA-256 of.
    """
    found: dict[str, Any] = {}
    for path in (output / "checkpoints").rglob("*"):
        name = str(path.relative_to(output))
        if path.name == "state.json":
            found[name] = drop_times(json.loads(path.read_text()) | {"files": None})
        elif path.is_file() and path.name != ".metadata":
            found[name] = path.read_bytes()
    assert any(name.endswith(".distcp") for name in found)
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
