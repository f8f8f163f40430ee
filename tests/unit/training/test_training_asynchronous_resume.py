"""An asynchronous run that is killed at any time trains each group once, in steps that each come once."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from support import forks
from support.resumed_ahead import GROUPS_PER_STEP, NUM_STEPS, run

pytestmark = pytest.mark.e2e

NUM_KILLS = 10
KILLS_PER_RUN = 5


def check(directory: Path, max_staleness: int = 2) -> None:
    """Each group is in one step."""
    steps = [json.loads((directory / f"trained-{step}.json").read_text()) for step in range(NUM_STEPS)]
    assert sorted(number for numbers in steps for number in numbers) == list(range(GROUPS_PER_STEP * NUM_STEPS))
    logged = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == list(range(NUM_STEPS))
    assert [line["train/policy_version"] for line in logged] == list(range(1, NUM_STEPS + 1))
    assert max(line["staleness/max"] for line in logged) <= max_staleness


@pytest.mark.parametrize("point", ["collect", "publish", "published", "on_step"])
def test_a_run_killed_at_any_point_of_a_step_trains_each_group_once(tmp_path, point):
    for step in (2, 5):
        assert forks.call(run, directory=str(tmp_path), kill_at=point, kill_step=step) == -signal.SIGKILL
    assert forks.call(run, directory=str(tmp_path)) == 0
    check(tmp_path)


def test_a_run_killed_at_random_times_trains_each_group_once(tmp_path):
    for name in ("first", "whole"):  # the first call waits for the imports
        started = time.perf_counter()
        (tmp_path / name).mkdir()
        assert forks.call(run, directory=str(tmp_path / name)) == 0
        check(tmp_path / name)
        seconds = time.perf_counter() - started
    rng = random.Random(0)
    num_kills = num_runs = 0
    while num_kills < NUM_KILLS:
        directory = tmp_path / str(num_runs)
        directory.mkdir()
        for _ in range(KILLS_PER_RUN):
            code = forks.call(run, directory=str(directory), limit_s=rng.uniform(0.1, 0.7) * seconds)
            assert code in (0, -signal.SIGKILL)
            if code == 0:
                seconds *= 0.8  # the machine was busier when it was measured
                break
            num_kills += 1
        assert forks.call(run, directory=str(directory)) == 0
        check(directory)
        num_runs += 1
