"""The chain of the README, killed at every kind of point: a warm start, then RL, then distillation into half the width.

Without a warm-up that teaches anything, rewards are all 0; the RL steps then train on the entropy of what was sampled.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from support.killed_chain import OUTPUTS, Kill, run_chain
from unbroken.runs.records.files import find_records, read_records

pytestmark = pytest.mark.e2e

SMALL = (
    *("--trainer.numerics=exact", "--preflight=false", "--warm-up.max-drill-steps=2", "--checkpoints.every=2"),
    *("--evaluation.num-problems=2", "--rollouts.problems-per-step=2", "--rollouts.group-size=2"),
)
OPTIONS = (
    [*SMALL, "--warm-start.steps=3", "--loop.num-steps=6", "--trainer.entropy-weight=0.01"],
    [*SMALL, "--warm-start.steps=2", "--loop.num-steps=4"],
)
KILLS = (
    Kill(command=0, point="model"),
    Kill(command=0, point="demonstrations"),
    Kill(command=0, point="update", count=2),  # of the warm start
    Kill(command=0, point="write"),  # its first checkpoint
    Kill(command=0, point="metrics", count=3),  # its last step, half logged
    Kill(command=0, point="sample", count=5),  # the rollouts of a step
    Kill(command=0, point="update", count=3),
    Kill(command=0, point="finish"),
    Kill(command=0, point="publish"),
    Kill(command=0, point="rename"),  # the final model
    Kill(command=0, point="end"),
    Kill(command=1, point="model"),  # the student
    Kill(command=1, point="teacher"),
    Kill(command=1, point="update", count=2),
    Kill(command=1, point="write"),
    Kill(command=1, point="rename"),
)
"""In the order in which the chain comes to them; a count begins anew with each start."""
SMOKE = (KILLS[1], KILLS[6], KILLS[10], KILLS[12])
TIMES = ("seconds/", "tokens_per_s/", "idle/", "memory/")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a chain that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_chain(folder, OPTIONS) == 0, (folder / "log").read_text()
    return folder


def read_metrics(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics" / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


def read_rollouts(output: Path) -> dict[tuple[int, int], Any]:
    return {key: list(map(drop_times, read_records(path))) for key, path in find_records(output / "rollouts").items()}


def drop_times(value: Any) -> Any:
    """A part of a record without seconds, and without the path of the model, which lies in the chain's folder."""
    if isinstance(value, dict):
        return {name: drop_times(each) for name, each in value.items() if not name.endswith("_s") and name != "model"}
    return [drop_times(each) for each in value] if isinstance(value, list) else value


def read_files(folder: Path) -> dict[str, bytes]:
    """Those of a model but for `unbroken.json`, which names the folder of the model that it was trained from."""
    files = [path for path in folder.iterdir() if path.name != "unbroken.json"]
    return {path.name: path.read_bytes() for path in files}


def assert_equal_chains(folder: Path, whole: Path) -> None:
    for output in OUTPUTS:
        assert read_metrics(folder / output) == read_metrics(whole / output)
        assert read_rollouts(folder / output) == read_rollouts(whole / output)
        for each in (f"{output}/final", f"{output}-model"):
            assert read_files(folder / each) == read_files(whole / each)


def test_the_chain_trains_in_all_of_its_parts(whole):
    first, second = (read_metrics(whole / output) for output in OUTPUTS)
    assert [line["step"] for line in first] == list(range(6))
    assert ["supervised/loss" in line for line in first] == [step < 3 for step in range(6)]
    assert all(line["mismatch/equal_share"] == 1 for line in [*first[3:], *second[2:]])
    assert all(line["teacher/token_share"] == 1 and line["teacher/kl"] > 0 for line in second[2:])


@pytest.mark.parametrize(
    "kills", [pytest.param(SMOKE, id="smoke"), pytest.param(KILLS, id="all", marks=pytest.mark.nightly)]
)
def test_a_chain_that_is_killed_and_started_again_equals_one_that_was_not(whole, tmp_path, kills):
    for kill in kills:
        assert run_chain(tmp_path, OPTIONS, kill) == -signal.SIGKILL, (kill, (tmp_path / "log").read_text()[-3000:])
    assert run_chain(tmp_path, OPTIONS) == 0, (tmp_path / "log").read_text()[-3000:]
    assert_equal_chains(tmp_path, whole)
