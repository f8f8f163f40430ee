"""The chain of the README, killed at every kind of point: a warm start, then RL, then distillation into half the width.

Without a warm-up that teaches anything, rewards are all 0; the RL steps then train on the entropy of what was sampled.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.equal_runs import find_differences, read_metrics, read_model
from support.killed_chain import OUTPUTS, Kill, run_chain

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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a chain that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_chain(folder, OPTIONS) == 0, (folder / "log").read_text()
    return folder


def assert_equal_chains(folder: Path, whole: Path) -> None:
    for output in OUTPUTS:
        assert find_differences(folder / output, whole / output) == []
        assert read_model(folder / f"{output}-model") == read_model(whole / f"{output}-model")


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
