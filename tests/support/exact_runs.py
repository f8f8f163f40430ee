"""Whether the rows of a finished run are exact, by what the run has recorded of every rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from unbroken.runs.records.files import find_records, read_records

RECORD_ALL = ("--rollout-log.scored-groups=none",)
"""The option that records all rollouts."""


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step."""
    return [json.loads(line) for line in (folder / "metrics" / "metrics.jsonl").read_text().splitlines()]


def check_exact(folder: Path, *, num_rollouts: int) -> list[dict[str, Any]]:
    """Compare the ids of all rollouts of a run; returns their records.

    What the trainer computed for each sampled id is what it was sampled with, for another id it would not be; each
    sampled id is trained, once; and no prompt had another history than the ids so far.
    """
    found = [
        line for path in find_records(folder / "rollouts").values() for line in read_records(path) if _is_rollout(line)
    ]
    assert len(found) == num_rollouts, f"{len(found)} rollouts are recorded"
    for record in found:
        forks = [turn["fork"] for turn in record["turns"] if turn["fork"] is not None]
        assert not forks, f"forks: {forks}"
        num_trained = 0
        for row in record["rows"]:
            assert row["is_trained"], f"a row of {record['trajectory']} is not trained on"
            ratio = np.array(row["trainer_logprobs"]) - np.array(row["rollout_logprobs"])
            assert np.all(np.expm1(ratio) - ratio <= 1e-10), f"k3 of {record['trajectory']}"
            num_trained += sum(stop - start for start, stop in row["loss"])
        num_sampled = sum(turn["num_sampled"] for turn in record["turns"])
        assert num_trained == num_sampled > 0, f"{num_trained} of {num_sampled} ids are trained on"
    for line in read_metrics(folder):
        assert line["train/num_rows"] > 0
        assert line["mismatch/num_tokens"] > 0
        assert line["mismatch/k3"] <= 1e-10
        assert line["counters/forks"] == 0
    return found


def _is_rollout(line: dict[str, Any]) -> bool:
    return bool(line["kind"] == "trajectory")
