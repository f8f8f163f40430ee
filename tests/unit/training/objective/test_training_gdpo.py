"""GDPO: each reward function normalised apart, against the paper's formula in plain Python."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support import gdpo_process
from support.effort import num_cases
from support.processes import run_two
from support.rows import build_samples, group, trajectory
from unbroken.counters import Counters
from unbroken.errors import InvalidInputError
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.training.config import TrainerConfig
from unbroken.training.loss_config import FailedRows, KlConfig, KlPlace, OverlongConfig
from unbroken.training.objective.advantages import ADVANTAGES, RewardParts, gdpo, grpo_advantages
from unbroken.training.objective.comparison import Processes
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.objective.samples import RowPolicy, build_trajectories, has_variance

GDPO = ADVANTAGES["gdpo"]
WEIGHTS = {"correct": 1.0, "short": 0.5}
opinions = st.one_of(st.none(), st.integers(-8, 8).map(lambda x: x / 4))
steps = st.lists(
    st.integers(1, 5).flatmap(
        lambda size: st.lists(st.lists(opinions, min_size=size, max_size=size), min_size=3, max_size=3)
    ),
    min_size=1,
    max_size=4,
)


def parts_of(functions: Sequence[Sequence[float | None]], weights: Sequence[float]) -> RewardParts:
    values = [[math.nan if each is None else each for each in of_function] for of_function in functions]
    return RewardParts(np.array(values), np.array(weights))


def member(correct: float | None, short: float | None = None, **options) -> Trajectory:
    """A trajectory with the sum of two functions."""
    parts = {name: value for name, value in (("correct", correct), ("short", short)) if value is not None}
    reward = sum(WEIGHTS[name] * value for name, value in parts.items())
    return replace(trajectory(reward, **options), reward_parts=parts, reward_weights=WEIGHTS)


def last_advantages(rows) -> list[float]:
    return [float(row.advantages[-1]) for row in rows]


def test_the_worked_example():
    (found,) = gdpo([RewardParts(np.array([[1.0, 0, 0, 1], [0, 10, 0, 10]]), np.ones(2))])
    np.testing.assert_allclose(found, np.array([0, 0, -2, 2]) / math.sqrt(2))


@settings(max_examples=num_cases(50, in_fuzz=1000), derandomize=True)
@given(steps)
def test_for_any_step_gdpo_is_the_papers_formula_over_those_who_have_an_opinion(drawn):
    weights = (1.0, 0.5, -2.0)
    summed = []
    for functions in drawn:
        total = [0.0] * len(functions[0])
        for weight, values in zip(weights, functions, strict=True):
            known = [value for value in values if value is not None]
            mean = sum(known) / len(known) if known else 0.0
            spread = math.sqrt(sum((value - mean) ** 2 for value in known) / len(known)) if known else 0.0
            for k, value in enumerate(values):
                total[k] += weight * (value - mean) / spread if value is not None and spread else 0.0
        summed.append(total)
    everything = [each for total in summed for each in total]
    mean = sum(everything) / len(everything)
    spread = math.sqrt(sum((each - mean) ** 2 for each in everything) / len(everything))
    assume(spread > 1e-6)
    found = gdpo([parts_of(functions, weights) for functions in drawn])
    for total, of_group in zip(summed, found, strict=True):
        np.testing.assert_allclose(of_group, [(each - mean) / spread for each in total], atol=1e-12)


def test_a_function_with_equal_rewards_adds_nothing_and_one_alone_is_grpo_by_the_steps_deviation():
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
    both, alone = (
        gdpo([parts_of(each, [1.0] * len(each))])[0] for each in ([rewards, [0.1 + 0.2, 0.3, 0.3, 0.3, 0.3]], [rewards])
    )
    assert both.tolist() == alone.tolist()
    np.testing.assert_allclose(alone, grpo_advantages(rewards))


@pytest.mark.parametrize(
    "functions",
    [
        [[1.0, 2.0, 4.0], [0.1, 0.2, 0.4]],  # weights 1 and -1: they cancel out but for rounding
        [[1.0, None, None], [None, 2.0, None]],
        [[None, None, None], [3.0, 3.0, 3.0]],
    ],
)
def test_what_teaches_nothing_has_exact_zeros_beside_a_group_that_does(functions):
    nothing, other = gdpo([parts_of(functions, [1.0, -1.0]), parts_of([[1.0, 0.0], [1.0, 1.0]], [1.0, -1.0])])
    assert not nothing.any()
    np.testing.assert_allclose(other * np.sqrt(2 / 5), [1, -1])


def test_groups_of_different_sizes_after_failures_are_compared_without_the_failed():
    failed = trajectory(None, status=TrajectoryStatus.FAILED)
    groups = [
        group(member(1, 2), member(0, 2), failed),
        group(member(1, 0), failed, member(1, 3), member(0, None), member(0, 3)),
        group(member(1, 2), failed),
    ]
    counters = Counters()
    expected = np.concatenate(
        gdpo([parts_of([[1, 0], [2, 2]], [1, 0.5]), parts_of([[1, 1, 0, 0], [0, 3, None, 3]], [1, 0.5])])
    )
    np.testing.assert_allclose(last_advantages(build_samples(groups, GDPO, counters)), expected, rtol=1e-6)
    assert counters.as_dict() == {"dropped_rows/failed": 3, "dropped_rows/small_group": 1}


def test_the_deviation_is_that_of_all_processes():
    theirs = parts_of([[5.0, 7.0, 7.0]], [3.0])
    mine = [group(member(1, 0), member(0, 0))]
    processes = Processes(1, lambda value: [([theirs], None), value])
    units = build_trajectories(mine, GDPO, Counters(), processes=processes)
    expected = gdpo([theirs, parts_of([[1, 0], [0, 0]], [1, 0.5])])[1]
    assert [float(unit.rows[0].advantages[-1]) for unit in units] == expected.astype(np.float32).tolist()


def test_a_group_with_equal_sums_is_not_replaced_if_parts_differ():
    differ = group(member(1, 0), member(0, 2), member(1, 0))
    assert len(set(differ.rewards)) == 1
    assert has_variance(differ, GDPO, RowPolicy())
    assert not has_variance(group(member(1, 2), member(1, 2)), GDPO, RowPolicy())
    counters = Counters()
    assert build_samples([group(member(1, 2), member(1, 2)), differ], GDPO, counters)[0].advantages[-1] > 0
    assert counters.as_dict() == {"dropped_rows/no_variance": 2}


def test_rewards_that_are_no_weighted_sum_are_refused():
    with pytest.raises(InvalidInputError, match=r"need a reward that is a weighted sum of functions .* has none"):
        build_samples([group(trajectory(1.0), trajectory(0.0))], GDPO, Counters())
    other = replace(member(0, 1), reward_weights={"correct": 2.0})
    with pytest.raises(InvalidInputError, match="has several"):
        build_samples([group(member(1, 1), other)], GDPO, Counters())


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (
            TrainerConfig(overlong=OverlongConfig(max_tokens=8, buffer=4)),
            r"overlong must be None .* got OverlongConfig.*",
        ),
        (TrainerConfig(failed=FailedRows.TRAIN), "failed must be drop .* got train"),
        (TrainerConfig(kl_weight=0.1, kl=KlConfig(place=KlPlace.REWARD)), r"kl\.place must be loss .* got reward"),
    ],
)
def test_what_changes_the_sum_and_no_part_of_it_is_refused(config, name):
    PolicyGradient(GDPO).check_config(TrainerConfig())
    with pytest.raises(InvalidInputError, match=rf"TrainerConfig\.{name}: it changes the sum of the rewards"):
        PolicyGradient(GDPO).check_config(config)


@pytest.mark.e2e
def test_two_processes_have_the_advantages_of_one_with_all_groups(tmp_path):
    """And where one has rewards without parts, both end."""
    run_two("support.gdpo_process", tmp_path)
    (first, of_first), (second, of_second) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    alone = build_samples([*gdpo_process.make_groups(0), *gdpo_process.make_groups(1)], GDPO, Counters())
    assert first + second == last_advantages(alone)
    assert "process 1 failed: InvalidInputError: advantages of parts" in of_first
    assert of_second.startswith("advantages of parts of rewards (gdpo) need")
