"""The numbers of an evaluation against their definitions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.rollout.trajectory import TrajectoryStatus
from unbroken.runs.evaluation.numbers import Sample, measure, summarize, tracked


def samples(*rewards: float | None, status: TrajectoryStatus = TrajectoryStatus.COMPLETED) -> list[Sample]:
    return [Sample(reward=each, status=status, num_sampled=4, versions=(3, 5)) for each in rewards]


def test_the_worked_example():
    found = summarize([samples(1, 0, 0, 0), samples(1, 1, 0, 0)], pass_reward=1.0)
    assert found == {
        "num_problems": 2, "num_rollouts": 8, "num_without_reward": 0, "num_cut": 0, "completion_tokens/mean": 4.0,
        "reward/mean": 3 / 8, "reward/standard_error": pytest.approx(1 / 8), "pass@1": pytest.approx(3 / 8),
        "pass@2": pytest.approx(2 / 3), "pass@4": 1.0, "policy_version/min": 3, "policy_version/max": 5,
    }  # fmt: skip


@given(st.lists(st.booleans(), min_size=1, max_size=7))
def test_pass_at_k_is_the_share_of_choices_of_k_with_one_that_passes(passed):
    found = summarize([samples(*map(float, passed))], pass_reward=1.0)
    sizes = [int(name.removeprefix("pass@")) for name in found if name.startswith("pass@")]
    assert sizes
    for k in sizes:
        choices = list(itertools.combinations(passed, k))
        assert found[f"pass@{k}"] == pytest.approx(np.mean([any(each) for each in choices]))


@given(st.lists(st.lists(st.floats(-1, 1), min_size=3, max_size=3), min_size=2, max_size=5))
def test_the_standard_error_is_that_of_the_mean_of_problems(rewards):
    found = summarize([samples(*each) for each in rewards], pass_reward=0.5)
    assert found["reward/mean"] == pytest.approx(np.mean(rewards), abs=1e-12)
    expected = np.std(np.mean(rewards, axis=1), ddof=1) / np.sqrt(len(rewards))
    assert found["reward/standard_error"] == pytest.approx(expected, abs=1e-12)
    assert found["pass@3"] == pytest.approx(np.mean([max(each) >= 0.5 for each in rewards]))
    assert found["pass@1"] == pytest.approx(np.mean(np.array(rewards) >= 0.5))


def test_what_has_no_reward_counts_as_0_and_what_is_unscored_counts_nowhere():
    cut, unscored = samples(None, status=TrajectoryStatus.TIMEOUT), samples(None, status=TrajectoryStatus.UNSCORED)
    found = summarize([samples(1) + cut, unscored * 2], pass_reward=1.0)
    assert (found["reward/mean"], found["pass@1"], found["pass@2"]) == (0.5, 0.5, 1.0)
    assert (found["num_without_reward"], found["num_cut"], found["num_rollouts"]) == (3, 1, 4)
    assert found["reward/standard_error"] is None
    nothing = summarize([unscored], pass_reward=1.0)
    assert (nothing["reward/mean"], "pass@1" in nothing) == (0.0, False)


@pytest.mark.parametrize("pass_reward", [0.0, -1.0])
@pytest.mark.parametrize("status", [TrajectoryStatus.FAILED, TrajectoryStatus.TIMEOUT])
def test_what_has_no_reward_passes_no_bound_however_low(pass_reward, status):
    problems = [samples(None, status=status) + samples(1.0)] * 2
    assert summarize(problems, pass_reward=pass_reward)["pass@1"] == 0.5
    assert measure(problems, pass_reward=pass_reward)["pass@1"].value == 0.5


def test_trackers_get_names_that_all_of_them_take():
    line = {"step": 3, "set": "math", "reward/mean": 0.5, "pass@4": 1.0, "reward/standard_error": None}
    assert tracked(line, set_name="math", default="evaluation") == {
        "evaluation/math/reward_mean": 0.5,
        "evaluation/math/pass_at_4": 1.0,
    }
    assert tracked(line, set_name="evaluation", default="evaluation").keys() == {
        "evaluation/reward_mean",
        "evaluation/pass_at_4",
    }
