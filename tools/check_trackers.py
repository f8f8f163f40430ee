"""Train two steps with W&B, MLflow and trackio, continue the run for a third, and read the numbers back from each.

    python tools/check_trackers.py RECIPE [--FIELD VALUE ...]    # in an empty folder; W&B is offline, MLflow in SQLite

The recipe is trained with these options. Every number of `metrics.jsonl` must be in each tracker, as must the
evaluations and a table of completions.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

Numbers: TypeAlias = dict[int, dict[str, Any]]
"""Of each step, by name."""
NAMES = ("wandb", "mlflow", "trackio")
OUTPUT = Path("run")


def main() -> int:
    """Train, and compare; returns the exit status."""
    os.environ.update(
        WANDB_MODE="offline",
        WANDB_SILENT="true",
        MLFLOW_TRACKING_URI="sqlite:///mlflow.db",
        TRACKIO_DIR=str(Path("trackio").absolute()),
    )
    from unbroken.cli import main as unbroken

    recipe, *options = sys.argv[1:]
    words = [f"--output={OUTPUT}", "--log-completions=2", f"--trackers.names={','.join(NAMES)}", *options]
    for num_steps in (2, 3):
        status = unbroken(["train", recipe, *words, f"--loop.num-steps={num_steps}"])
        if status:
            return status
    lines = [json.loads(line) for line in (OUTPUT / "metrics" / "metrics.jsonl").read_text("utf-8").splitlines()]
    expected = {line.pop("step"): line for line in lines}
    assert sorted(expected) == [0, 1, 2], sorted(expected)
    for name, read in (("wandb", read_wandb), ("mlflow", read_mlflow), ("trackio", read_trackio)):
        compare(name, expected, read())
        print(f"{name}: {len(expected)} steps of {len(expected[0])} numbers, evaluations, and a table")
    return 0


def compare(name: str, expected: Mapping[int, Mapping[str, Any]], found: Numbers) -> None:
    """Check that a tracker has all numbers of each step, an evaluation, and a table."""
    for step, numbers in expected.items():
        for key, value in numbers.items():
            if value is not None and not math.isclose(float(found[step][clean(key)]), value, rel_tol=1e-6):
                raise AssertionError(f"{name}, step {step}, {key}: {found[step][clean(key)]} instead of {value}")
    everything = {key for numbers in found.values() for key in numbers}
    for key in ("evaluation/reward_mean", "evaluation/pass_at_1", "completions"):
        assert any(each.startswith(key) for each in everything), (name, key, sorted(everything))


def clean(name: str) -> str:
    """A name as all trackers may have it."""
    return re.sub(r"[^\w/]", "_", name)


def read_wandb() -> Numbers:
    """Read the files of the offline runs, one for each start."""
    from wandb.proto import wandb_internal_pb2

    found: Numbers = {}
    paths = sorted((OUTPUT / "metrics" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(paths) == 2, paths
    assert len({path.name for path in paths}) == 1, "the second start continues the run of the first"
    for path in paths:
        for data in read_log(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if items:
                values = {clean(key): json.loads(value) for key, value in items.items()}
                found.setdefault(record.history.step.num, {}).update(values)
    return found


def read_log(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format after a header of 7 bytes, which wandb has no reader for."""
    position, block, record = 7, 32768, b""
    while position + 7 <= len(data):
        if block - position % block < 7:  # no room for another header
            position += block - position % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_mlflow() -> Numbers:
    """Read the store."""
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("unbroken")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["loop.num_steps"] == "2", "the value of the first start"
    found: Numbers = {}
    for key in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, key):
            found.setdefault(metric.step, {})[clean(key)] = metric.value
    tables = client.load_table(experiment.experiment_id, "completions/step-00000002.json")
    assert len(tables) == 2, tables
    found[2]["completions"] = True
    return found


def read_trackio() -> Numbers:
    """Read its database."""
    found: Numbers = {}
    for entry in _trackio_entries():
        step = entry.pop("step")
        found.setdefault(step, {}).update({clean(key): value for key, value in entry.items()})
    return found


def _trackio_entries() -> Iterator[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("unbroken")
    yield from (dict(entry) for entry in SQLiteStorage.get_logs("unbroken", run))


if __name__ == "__main__":
    sys.exit(main())
