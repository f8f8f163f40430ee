"""A run that is killed and resumed equals one that was not, bit for bit."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from support import forks
from support.resumed_run import NUM_STEPS, POINTS, SKIPPED_STEP, run

pytestmark = pytest.mark.e2e

NUM_KILLS = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, float]:
    """The folder of a run that nobody killed, and its seconds."""
    for name in ("first", "whole"):  # the first call waits for the imports
        directory = tmp_path_factory.mktemp(name)
        started = time.perf_counter()
        assert forks.call(run, directory=str(directory)) == 0
    return directory, time.perf_counter() - started


def lines(directory: Path) -> list[dict]:
    """The metrics but for times and memory, which differ from run to run.

    Also but for the last bits of what a step compares that trains nothing: whether rows share their prefixes in a pass
    is found out by the first step that a process trains.
    """
    whole_lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    found = []
    for line in whole_lines:
        varying = ("seconds/", "tokens_per_s/", "idle/", "memory/")
        if not line.get("train/num_rows", 1):
            assert line["mismatch/k3"] < 1e-10
            varying += ("mismatch/",)
        found.append({name: value for name, value in line.items() if not name.startswith(varying)})
    return found


def assert_equal_runs(directory: Path, whole: Path) -> None:
    assert lines(directory) == lines(whole)
    found, expected = torch.load(directory / "final.pt"), torch.load(whole / "final.pt")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_run_trains_and_logs_each_step_once(whole):
    directory, _ = whole
    assert [line["step"] for line in lines(directory)] == list(range(NUM_STEPS))
    assert [step for step, line in enumerate(lines(directory)) if not line["train/num_rows"]] == [SKIPPED_STEP]
    assert lines(directory)[-1]["train/policy_version"] == NUM_STEPS - 1


def test_a_run_killed_at_random_times_equals_the_whole_run(whole, tmp_path):
    """As many runs as the kills take, each killed again and again until it ends."""
    reference, seconds = whole
    rng = random.Random(0)
    num_kills = num_runs = 0
    while num_kills < NUM_KILLS:
        directory = tmp_path / str(num_runs)
        while (code := forks.call(run, directory=str(directory), limit_s=rng.uniform(0.1, 0.6) * seconds)) != 0:
            assert code == -signal.SIGKILL
            num_kills += 1
            seconds *= 1.05  # the machine may be busier than when it was measured
        seconds *= 0.8
        assert_equal_runs(directory, reference)
        num_runs += 1


@pytest.mark.parametrize(
    ("every", "point"), [*((1, point) for point in POINTS), (3, "state"), (3, "write"), (3, "finish"), (3, "published")]
)
def test_a_run_killed_at_any_point_of_a_step_equals_the_whole_run(whole, tmp_path, every, point):
    for step in (2, 5):
        killed = forks.call(run, directory=str(tmp_path), every=every, kill_at=point, kill_step=step)
        assert killed == -signal.SIGKILL
    assert forks.call(run, directory=str(tmp_path), every=every) == 0
    assert_equal_runs(tmp_path, whole[0])


def test_a_run_killed_in_or_after_its_warm_start_equals_the_whole_run(tmp_path):
    """Three supervised steps, then five of rollouts with supervised rows beside them."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert forks.call(run, directory=str(whole), num_supervised=3) == 0
    steps = lines(whole)
    assert ["supervised/grad_norm" in line for line in steps] == [step < 3 for step in range(NUM_STEPS)]
    assert [line["train/policy_version"] for line in steps] == [1, 2, 3, 4, 5, 6, 6, 7]  # a step has equal rewards
    assert ["reward/mean" in line for line in steps] == [step >= 3 for step in range(NUM_STEPS)]
    for point, step in (("on_step", 0), ("write", 1), ("finish", 2), ("on_step", 2), ("publish", 1), ("on_step", 5)):
        code = forks.call(run, directory=str(killed), num_supervised=3, kill_at=point, kill_step=step)
        assert code == -signal.SIGKILL, (point, step)
    assert forks.call(run, directory=str(killed), num_supervised=3) == 0
    assert_equal_runs(killed, whole)


def test_a_finished_run_that_is_started_again_changes_nothing(whole, tmp_path):
    for _ in range(2):
        assert forks.call(run, directory=str(tmp_path)) == 0
    assert_equal_runs(tmp_path, whole[0])


def test_nothing_is_left_of_checkpoints_that_were_cut_short(whole, tmp_path):
    (tmp_path / "checkpoints" / (".step-00000002-" + "0" * 32)).mkdir(parents=True)
    assert forks.call(run, directory=str(tmp_path)) == 0
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000007", "step-00000008"]
