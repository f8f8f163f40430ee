"""Advantages: golden numbers, and what must hold for any rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from unbroken.errors import RewardError
from unbroken.training.objective.advantages import (
    ADVANTAGES,
    EQUAL_WITHIN,
    RewardParts,
    StepAdvantages,
    batch_scaled_grpo,
    grpo_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo_advantages,
)

rewards_of_groups = st.lists(st.floats(-1000, 1000, allow_nan=False, width=32), min_size=2, max_size=16)
any_rewards = settings(max_examples=num_cases(60, in_fuzz=1500), derandomize=True)


def test_golden_grpo_of_half_right_is_plus_and_minus_one():
    np.testing.assert_allclose(grpo_advantages([1, 0, 0, 1]), [1, -1, -1, 1])


def test_golden_grpo_divides_by_the_population_standard_deviation():
    # mean 1/4, deviations 3/4, -1/4 (three times), variance (9 + 3) / 16 / 4 = 3/16
    np.testing.assert_allclose(grpo_advantages([1, 0, 0, 0]), np.array([3, -1, -1, -1]) / np.sqrt(3))


def test_golden_dr_grpo_only_subtracts_the_mean():
    np.testing.assert_allclose(grpo_advantages([1, 0, 0, 0], normalize=False), [0.75, -0.25, -0.25, -0.25])


def test_golden_rloo_subtracts_the_mean_of_the_others():
    np.testing.assert_allclose(rloo_advantages([4, 1, 1]), [3, -1.5, -1.5])


@any_rewards
@given(rewards_of_groups)
def test_for_any_rewards_the_advantages_sum_to_zero(rewards):
    scale = max(1.0, np.abs(rewards).max())
    assert abs(grpo_advantages(rewards, normalize=False).sum()) < 1e-9 * scale * len(rewards)
    assert abs(rloo_advantages(rewards).sum()) < 1e-9 * scale * len(rewards)
    centred = grpo_advantages(rewards, normalize=False)
    assume(not centred.any() or np.std(rewards) > 1e-6 * scale)
    assert abs(grpo_advantages(rewards).sum()) < 1e-6 * len(rewards)


@any_rewards
@given(rewards_of_groups)
def test_for_any_rewards_rloo_is_the_reward_minus_the_mean_of_the_others(rewards):
    assume(np.ptp(rewards) > 1e-6 * np.abs(rewards).max())
    expected = [r - np.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(rloo_advantages(rewards), expected, atol=1e-9 * max(1.0, np.abs(rewards).max()))


@any_rewards
@given(rewards_of_groups)
def test_for_any_rewards_rloo_is_the_centred_reward_times_g_over_g_minus_one(rewards):
    num = len(rewards)
    np.testing.assert_allclose(rloo_advantages(rewards), grpo_advantages(rewards, normalize=False) * num / (num - 1))


@any_rewards
@given(rewards_of_groups)
def test_for_any_rewards_that_differ_grpo_has_variance_one(rewards):
    assume(np.std(rewards) > 1e-6 * max(1.0, np.abs(rewards).max()))
    assert np.std(grpo_advantages(rewards)) == pytest.approx(1)


@any_rewards
@given(rewards_of_groups, st.floats(-100, 100), st.floats(0.125, 8))
def test_for_any_rewards_grpo_ignores_their_offset_and_scale(rewards, offset, scale):
    assume(np.std(rewards) > 1e-3 * max(1.0, np.abs(rewards).max()))
    moved = [scale * reward + offset for reward in rewards]
    np.testing.assert_allclose(grpo_advantages(moved), grpo_advantages(rewards), atol=1e-6)


@any_rewards
@given(st.floats(-1e30, 1e30), st.integers(2, 16))
def test_equal_rewards_give_exact_zeros(reward, num):
    """Rounding in the mean must not be blown up to advantages of 1 by a standard deviation of 1e-17."""
    rewards = [reward] * num
    for advantages in (grpo_advantages(rewards), grpo_advantages(rewards, normalize=False), rloo_advantages(rewards)):
        assert not advantages.any()


def test_rewards_of_a_tenth_give_exact_zeros():
    assert np.mean([0.1, 0.1, 0.1]) != 0.1
    assert not grpo_advantages([0.1, 0.1, 0.1]).any()


@pytest.mark.parametrize(
    "rewards",
    [[0.1 + 0.2, 0.3, 0.3], [1e30, 1e30 * (1 + 1e-15)], [-0.1 - 0.2, -0.3], [sum([0.1] * 10), 1.0]],
)
def test_rewards_that_differ_by_rounding_only_give_exact_zeros(rewards):
    assert len(set(rewards)) > 1
    for advantages in (grpo_advantages(rewards), grpo_advantages(rewards, normalize=False), rloo_advantages(rewards)):
        assert not advantages.any()


def test_rewards_that_differ_by_more_than_rounding_are_told_apart_however_small_they_are():
    np.testing.assert_allclose(grpo_advantages([1.0, 1.00001]), [-1, 1])
    np.testing.assert_allclose(grpo_advantages([1e-30, 0.0]), [1, -1])
    np.testing.assert_allclose(grpo_advantages([1.0, 1.0 + 1e-12]), [-1, 1])


@pytest.mark.parametrize("name", sorted({*ADVANTAGES} - {"turn_grpo", "turn_returns", "zero"}))
def test_a_constant_that_all_rewards_share_hides_no_difference(name):
    """Beside 1e9 the difference of a quarter is below float32's rounding, and far above that of float64."""
    given: Any = ADVANTAGES[name]
    rewards = [[0.0, 0.25, 0.0, 0.25], [0.25, 0.0, 0.0, 0.0]]
    large = [[1e9 + each for each in group] for group in rewards]
    function = given if isinstance(given, StepAdvantages) else StepAdvantages(lambda groups: [*map(given, groups)])
    if function.of_parts:
        rewards, large = ([RewardParts(np.array([each]), np.ones(1)) for each in groups] for groups in (rewards, large))
    for found, expected in zip(function.function(large), function.function(rewards), strict=True):
        assert np.any(expected)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_grpo_of_a_group_of_one_is_zero():
    assert grpo_advantages([3.0]).tolist() == [0.0]


def test_rloo_of_a_group_of_one_is_refused_and_says_why():
    with pytest.raises(
        RewardError, match=r"compares a trajectory with the others .* 1 reward \(3\.0\): sample at least 2"
    ):
        rloo_advantages([3.0])


@pytest.mark.parametrize("advantages", [grpo_advantages, rloo_advantages])
@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([0.0, float("nan")], r"rewards\[1\] must be finite in float32, got nan"),
        ([float("-inf"), 0.0], r"rewards\[0\] must be finite in float32, got -inf"),
        ([0.0, 10**400], r"rewards\[1\] must be finite in float32, got an integer of 1329 bits"),
        ([0.0, 1e39], r"rewards\[1\] must be finite in float32, got 1e\+39"),
        ([0.0, None], r"rewards\[1\] must be one number, got None"),
        (["1", 0.0], r"rewards\[0\] must be one number, got '1' \(str\)"),
        ([[1.0, 0.0]], r"shape \[G\], got shape \(1, 2\)"),
        ([[1.0], [0.0, 1.0]], r"rewards\[0\] must be one number, got \[1\.0\]"),
        (1.0, r"shape \[G\], got shape \(\)"),
        ([], "at least one number, got none"),
        ([0.0, 1j], r"rewards\[1\] must be one number"),
    ],
)
def test_bad_rewards_are_named_with_index_and_value(advantages, rewards, message):
    with pytest.raises(RewardError, match=message):
        advantages(rewards)


def test_rewards_may_be_bools_ints_and_numpy_numbers():
    rewards = [True, 0, np.float32(1), np.int64(0)]
    np.testing.assert_allclose(grpo_advantages(rewards), [1, -1, 1, -1])
    np.testing.assert_allclose(grpo_advantages(np.array([True, False])), [1, -1])


def test_golden_batch_scaled_grpo_of_the_worked_example():
    first, second = batch_scaled_grpo([[1, 0, 0, 1], [1, 1]])
    np.testing.assert_allclose(first, np.array([1, -1, -1, 1]) * 3 / (2 * np.sqrt(2)))
    assert second.tolist() == [0, 0]


def test_golden_reinforce_plus_plus_of_the_worked_example():
    """Six rewards with mean 2/3 and deviation sqrt(2)/3; centred in their groups, their deviation is sqrt(1/6)."""
    first, second = reinforce_plus_plus([[1, 0, 0, 1], [1, 1]])
    np.testing.assert_allclose(first, np.array([1, -2, -2, 1]) / np.sqrt(2))
    np.testing.assert_allclose(second, np.array([1, 1]) / np.sqrt(2))
    first, second = reinforce_plus_plus_baseline([[1, 0, 0, 1], [1, 1]])
    np.testing.assert_allclose(first, np.array([0.5, -0.5, -0.5, 0.5]) * np.sqrt(6))
    assert second.tolist() == [0, 0]


@any_rewards
@given(st.lists(rewards_of_groups, min_size=1, max_size=4))
def test_for_any_groups_reinforce_plus_plus_is_a_loop_in_plain_python(groups):
    everything = [reward for rewards in groups for reward in rewards]
    mean = sum(everything) / len(everything)
    spread = (sum((reward - mean) ** 2 for reward in everything) / len(everything)) ** 0.5
    assume(spread > 1e-3 * max(1.0, max(map(abs, everything))))
    for rewards, found in zip(groups, reinforce_plus_plus(groups), strict=True):
        np.testing.assert_allclose(found, [(reward - mean) / spread for reward in rewards], rtol=1e-9, atol=1e-9)


@any_rewards
@given(st.lists(rewards_of_groups, min_size=1, max_size=4))
def test_for_any_groups_reinforce_plus_plus_baseline_is_a_loop_in_plain_python(groups):
    centred = []
    for rewards in groups:
        assume(np.ptp(rewards) > 1e-3 * max(1.0, max(map(abs, rewards))))
        centred.append([reward - sum(rewards) / len(rewards) for reward in rewards])
    everything = [value for values in centred for value in values]
    mean = sum(everything) / len(everything)
    spread = (sum((value - mean) ** 2 for value in everything) / len(everything)) ** 0.5
    for values, found in zip(centred, reinforce_plus_plus_baseline(groups), strict=True):
        np.testing.assert_allclose(found, [value / spread for value in values], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("function", [reinforce_plus_plus, reinforce_plus_plus_baseline, batch_scaled_grpo])
def test_a_step_of_equal_rewards_or_without_any_has_no_advantages(function):
    assert [values.tolist() for values in function([[0.1 + 0.2, 0.3], [0.3, 0.3, 0.3]])] == [[0, 0], [0, 0, 0]]
    assert function([]) == []


def test_dr_grpo_is_grpo_without_the_division():
    assert ADVANTAGES["dr_grpo"]([1, 0, 0, 0]).tolist() == grpo_advantages([1, 0, 0, 0], normalize=False).tolist()


def test_batch_scaled_grpo_of_one_group_is_grpo():
    np.testing.assert_allclose(batch_scaled_grpo([[1, 0, 0, 5]])[0], grpo_advantages([1, 0, 0, 5]))


def test_batch_scaled_grpo_of_groups_that_are_each_equal_is_zero_though_the_groups_differ():
    assert [values.tolist() for values in batch_scaled_grpo([[1, 1], [0, 0, 0]])] == [[0, 0], [0, 0, 0]]


@any_rewards
@given(st.lists(rewards_of_groups, max_size=4))
def test_for_any_groups_batch_scaled_grpo_is_a_loop_in_plain_python(groups):
    everything = [reward for rewards in groups for reward in rewards]
    mean = sum(everything) / max(len(everything), 1)
    spread = (sum((reward - mean) ** 2 for reward in everything) / max(len(everything), 1)) ** 0.5
    for rewards, found in zip(groups, batch_scaled_grpo(groups), strict=True):
        if max(rewards) - min(rewards) <= EQUAL_WITHIN * max(map(abs, rewards)):
            assert not found.any()
            continue
        expected = [(reward - sum(rewards) / len(rewards)) / spread for reward in rewards]
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
