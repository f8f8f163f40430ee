"""What a run prints: a line for each step, on a terminal too."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from unbroken.runs.observer import RunProgress

METRICS = {"reward/mean": 0.5, "mismatch/k3": 1e-7, "seconds/step": 60.0}


@pytest.mark.parametrize("is_terminal", [False, True])
def test_each_step_has_a_line_with_its_number_and_the_time_that_is_left(is_terminal):
    shown = io.StringIO()
    progress = RunProgress(Console(file=shown, force_terminal=is_terminal, color_system=None))
    progress.show_step(0, METRICS, num_steps=3)
    progress.show_step(1, METRICS | {"counters/status/timeout": 2, "counters/status/failed": 1}, num_steps=3)
    progress.show_step(2, METRICS, num_steps=3)
    assert shown.getvalue().splitlines() == [
        "step 0 (1 of 3)  reward 0.5  s 60  left 0:02:00",
        "step 1 (2 of 3)  reward 0.5  s 60  time-outs 2  failures 1  left 0:00:30",
        "step 2 (3 of 3)  reward 0.5  s 60",
    ]


def test_the_time_that_is_left_is_that_of_steps_of_the_same_kind():
    """Supervised steps are ten times as fast as those that sample, and say nothing of how long these take."""
    shown = io.StringIO()
    progress = RunProgress(Console(file=shown, color_system=None))
    for step in (0, 1):
        progress.show_step(step, {"supervised/loss": 2.0, "seconds/step": 1.0}, num_steps=12, num_supervised=2)
    progress.show_step(2, METRICS, num_steps=12, num_supervised=2)
    assert shown.getvalue().splitlines() == [
        "step 0 (1 of 12)  supervised loss 2  s 1  left 0:00:01 of the warm start",
        "step 1 (2 of 12)  supervised loss 2  s 1",
        "step 2 (3 of 12)  reward 0.5  s 60  left 0:09:00",
    ]


def test_the_parts_of_a_reward_stand_behind_it_and_a_mismatch_above_rounding_too():
    shown = io.StringIO()
    progress = RunProgress(Console(file=shown, color_system=None, width=200))
    parts = {"reward/one_lookup_mean": 0.25, "reward/correct_mean": 0.475}
    progress.show_step(0, METRICS | parts | {"mismatch/k3": 1e-3}, num_steps=1)
    progress.show_step(0, METRICS | {"reward/correct_mean": 0.5}, num_steps=1)
    assert shown.getvalue().splitlines() == [
        "step 0 (1 of 1)  reward 0.5 (correct 0.475, one_lookup 0.25)  mismatch k3 0.001  s 60",
        "step 0 (1 of 1)  reward 0.5  s 60",
    ]
