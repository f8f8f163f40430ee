"""What becomes a row, what is dropped, and that it is counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from support.rows import TWO_IDS, build_samples, group, trajectory
from support.sequences import sampled
from unbroken.counters import Counters, Event
from unbroken.errors import InvalidInputError, RewardError, TrainingError
from unbroken.ledger.nodes import Origin, Position
from unbroken.rollout.trajectory import TrajectoryStatus
from unbroken.training.config import TrainerConfig
from unbroken.training.loss_config import KlConfig, KlPlace, OverlongConfig, TruncatedRows
from unbroken.training.objective.advantages import StepAdvantages, batch_scaled_grpo, grpo_advantages, rloo_advantages
from unbroken.training.objective.comparison import Processes
from unbroken.training.objective.policy_gradient import ALGORITHMS, PolicyGradient
from unbroken.training.objective.samples import TRAINABLE, RowPolicy, build_trajectories


def dr_grpo(rewards):
    return grpo_advantages(rewards, normalize=False)


def test_the_worked_example_of_the_module():
    counters = Counters()
    siblings = group(
        trajectory(1.0, completion=sampled(7, 8)),
        trajectory(0.0, completion=sampled(9)),
        trajectory(0.0, status=TrajectoryStatus.MAX_TURNS),
        trajectory(1.0, status=TrajectoryStatus.TRUNCATED),
        trajectory(None, status=TrajectoryStatus.FAILED),
    )
    rows = build_samples([siblings], dr_grpo, counters)
    assert [row.token_ids.tolist() for row in rows[:2]] == [[5, 6, 7, 8], [5, 6, 9]]
    assert [row.loss_mask.tolist() for row in rows[:2]] == [[False, False, True, True], [False, False, True]]
    assert [row.advantages.tolist() for row in rows[:2]] == [[0, 0, 0.5, 0.5], [0, 0, -0.5]]
    assert [row.advantages[-1] for row in rows] == [0.5, -0.5, -0.5, 0.5]
    assert counters.as_dict() == {"dropped_rows/failed": 1}


def test_each_branch_of_a_forked_trajectory_is_a_row_with_the_trajectorys_advantage():
    forked = trajectory(1.0, completion=sampled(7, 8))
    again = forked.tree.add_given([3], Origin.PROMPT, parent=Position(node=0, offset=2))
    forked.tree.add_sampled(sampled(4), parent=again)
    rows = build_samples([group(forked, trajectory(0.0))], dr_grpo, Counters())
    assert [row.token_ids.tolist() for row in rows] == [[5, 6, 7, 8], [5, 6, 3, 4], [5, 6, 7, 8]]
    assert [row.advantages[-1] for row in rows] == [0.5, 0.5, -0.5]
    units = build_trajectories([group(forked, trajectory(0.0))], dr_grpo, Counters())
    assert [len(unit.rows) for unit in units] == [2, 1]


@pytest.mark.parametrize("status", list(TrajectoryStatus))
def test_i8_each_status_is_either_trained_on_or_counted_as_dropped(status):
    counters = Counters()
    reward = 1.0 if status in TRAINABLE else None
    rows = build_samples(
        [group(trajectory(0.0), trajectory(0.5), trajectory(reward, status=status))], dr_grpo, counters
    )
    assert len(rows) + counters.total(Event.DROPPED_ROW) == 3
    assert counters[f"dropped_rows/{status}"] == (0 if status in TRAINABLE else 1)


def test_what_the_policy_did_not_bring_about_is_not_trained_on():
    left_out = {TrajectoryStatus.FAILED, TrajectoryStatus.ABORTED, TrajectoryStatus.UNSCORED}
    assert set(TrajectoryStatus) - TRAINABLE == left_out


def test_a_time_out_is_compared_with_its_siblings_and_a_failure_is_not():
    late = trajectory(0.0, status=TrajectoryStatus.TIMEOUT)
    failed = trajectory(None, status=TrajectoryStatus.FAILED)
    counters = Counters()
    rows = build_samples([group(trajectory(1.0), late, failed)], dr_grpo, counters)
    assert [float(row.advantages.sum()) for row in rows] == [1.0, -1.0]
    assert counters.as_dict() == {"dropped_rows/failed": 1}


def test_a_failed_trajectorys_reward_is_no_part_of_the_baseline():
    members = [trajectory(1.0), trajectory(0.0)]
    failed = trajectory(-100.0, status=TrajectoryStatus.FAILED)
    without = build_samples([group(*members)], rloo_advantages, Counters())
    with_failed = build_samples([group(failed, *members)], rloo_advantages, Counters())
    assert [r.advantages.tolist() for r in with_failed] == [r.advantages.tolist() for r in without]


def test_over_a_step_only_members_that_are_trained_on_count_in_mean_and_deviation():
    """Left are [1, 0] and [1, 1, 0]: their means are 1/2 and 2/3, the deviation of all five is sqrt(0.24).

    The failed member has a reward that would move its group's mean, the lone member of the third group one that would
    move the deviation.
    """
    failed = trajectory(-100.0, status=TrajectoryStatus.FAILED)
    groups = [
        group(trajectory(1.0), failed, trajectory(0.0)),
        group(trajectory(1.0), trajectory(1.0), trajectory(0.0)),
        group(trajectory(50.0), failed),
    ]
    counters = Counters()
    rows = build_samples(groups, StepAdvantages(batch_scaled_grpo), counters)
    expected = np.array([1 / 2, -1 / 2, 1 / 3, 1 / 3, -2 / 3]) / np.sqrt(0.24)
    np.testing.assert_allclose([row.advantages[-1] for row in rows], expected, rtol=1e-6)
    assert counters.as_dict() == {"dropped_rows/failed": 2, "dropped_rows/small_group": 1}


def test_over_a_step_a_group_without_variance_widens_the_deviation_and_is_dropped():
    counters = Counters()
    equal = group(*[trajectory(4.0)] * 2)
    rows = build_samples([equal, group(trajectory(1.0), trajectory(0.0))], StepAdvantages(batch_scaled_grpo), counters)
    expected = np.array([0.5, -0.5]) / np.std([4, 4, 1, 0])
    np.testing.assert_allclose([row.advantages[-1] for row in rows], expected, rtol=1e-6)
    assert counters.as_dict() == {"dropped_rows/no_variance": 2}


def test_over_several_processes_the_groups_of_all_are_compared():
    """This process has [1, 0], the first has [5, 7]: the four together have the mean 3.25."""
    mine = [group(trajectory(1.0), trajectory(0.0))]
    processes = Processes(1, lambda value: [([np.array([5.0, 7.0])], None), value])
    advantages = ALGORITHMS["reinforce_plus_plus"].advantages
    units = build_trajectories(mine, advantages, Counters(), processes=processes)
    expected = (np.array([1, 0]) - 3.25) / np.std([5, 7, 1, 0])
    np.testing.assert_allclose([unit.rows[0].advantages[-1] for unit in units], expected, rtol=1e-6)


def test_a_zero_advantage_counts_in_the_divisor_also_if_only_another_process_has_others():
    """Here [3], there [5, 1], whose mean is 3 too."""
    processes = Processes(1, lambda value: [([np.array([5.0, 1.0])], None), value])
    advantages = ALGORITHMS["reinforce_plus_plus"].advantages
    counters = Counters()
    (unit,) = build_trajectories([group(trajectory(3.0))], advantages, counters, processes=processes)
    assert unit.rows == ()
    assert unit.idle_rows[0].advantages.tolist() == [0, 0, 0, 0]
    assert counters.as_dict() == {"dropped_rows/no_variance": 1}


def test_over_several_processes_the_failure_of_one_is_raised_on_all_and_none_waits():
    calls = []

    def gather(value):
        calls.append(value)
        return [value, ([], "RewardError: rewards[0] must be finite")]

    advantages = ALGORITHMS["reinforce_plus_plus"].advantages
    good = [group(trajectory(1.0), trajectory(0.0))]
    with pytest.raises(TrainingError, match=r"process 1 failed: RewardError: rewards\[0\] must be finite"):
        build_trajectories(good, advantages, Counters(), processes=Processes(0, gather))
    bad = [group(trajectory(float("nan")), trajectory(0.0))]
    with pytest.raises(RewardError, match=r"rewards\[0\] must be finite"):
        build_trajectories(bad, advantages, Counters(), processes=Processes(0, gather))
    assert len(calls) == 2


def test_a_group_that_is_all_right_learns_from_it_if_groups_are_compared():
    objective, counters = ALGORITHMS["reinforce_plus_plus"], Counters()
    groups = [group(*[trajectory(1.0)] * 2), group(trajectory(0.0), trajectory(1.0))]
    rows = build_samples(groups, objective.advantages, counters)
    np.testing.assert_allclose([row.advantages[-1] for row in rows], np.array([1, 1, -3, 1]) / np.sqrt(3), rtol=1e-6)
    assert counters.as_dict() == {}
    assert objective.has_variance(groups[0], TrainerConfig())


def test_one_trajectory_of_each_problem_is_enough_if_groups_are_compared():
    objective, counters = ALGORITHMS["reinforce_plus_plus"], Counters()
    failed = trajectory(None, status=TrajectoryStatus.FAILED)
    groups = [group(trajectory(1.0)), group(trajectory(0.0)), group(trajectory(0.5), failed), group(failed)]
    rows = build_samples(groups, objective.advantages, counters)
    np.testing.assert_allclose([row.advantages[-1] for row in rows], np.array([1, -1]) * np.sqrt(1.5), atol=1e-6)
    assert counters.as_dict() == {"dropped_rows/failed": 2, "dropped_rows/no_variance": 1}  # the mean itself
    baseline = ALGORITHMS["reinforce_plus_plus_baseline"].advantages
    with pytest.raises(InvalidInputError, match=r"must have at least 2 trajectories, .* got 1"):
        build_samples(groups, baseline, Counters())


def test_a_masked_trajectory_counts_for_its_siblings_and_is_not_trained_on():
    counters = Counters()
    siblings = group(
        trajectory(3.0),
        trajectory(0.0, status=TrajectoryStatus.TRUNCATED),
        trajectory(0.0, status=TrajectoryStatus.MAX_TOKENS),
        trajectory(1.0, status=TrajectoryStatus.MAX_TURNS),
    )
    policy = RowPolicy(truncated=TruncatedRows.MASK)
    units = build_trajectories([siblings], dr_grpo, counters, policy=policy)
    assert [[row.advantages[-1] for row in unit.rows] for unit in units] == [[2], [], [], [0]]
    assert not any(unit.idle_rows for unit in units)
    assert counters.as_dict() == {"dropped_rows/masked": 2}


@pytest.mark.parametrize(("num_tokens", "lost"), [(1, 0), (80, 0), (85, 0.5), (90, 1), (100, 2), (500, 2)])
def test_the_overlong_punishment_rises_linearly_over_the_buffer(num_tokens, lost):
    """DAPO's equation 13, times the penalty."""
    assert OverlongConfig(max_tokens=100, buffer=20, penalty=2).punish(num_tokens) == pytest.approx(lost)


def test_a_long_trajectory_has_a_lower_reward_than_its_equally_good_sibling():
    """Of 2 and 4 ids, 4 are one over the 3 that cost nothing, of a buffer of two: half of the penalty."""
    siblings = [group(trajectory(1.0), trajectory(1.0, completion=sampled(1, 2, 3, 4)))]
    config = TrainerConfig(overlong=OverlongConfig(max_tokens=5, buffer=2))
    policy = PolicyGradient()._get_row_policy(config)
    counters = Counters()
    units = build_trajectories(siblings, dr_grpo, counters, policy=policy)
    assert counters.as_dict() == {"punishments/overlong": 1}
    assert [unit.rows[0].advantages[-1] for unit in units] == [0.25, -0.25]
    assert [unit.reward for unit in units] == [1.0, 0.5]
    assert PolicyGradient().has_variance(siblings[0], config)
    assert not PolicyGradient().has_variance(siblings[0], TrainerConfig())


@pytest.mark.parametrize("entropy_weight", [0.0, 0.1])
async def test_with_the_distance_in_the_reward_unscored_trajectories_teach_nothing(entropy_weight):
    counters, kl = Counters(), KlConfig(place=KlPlace.REWARD)
    config = TrainerConfig(kl_weight=0.1, kl=kl, entropy_weight=entropy_weight)
    unscored = trajectory(None, status=TrajectoryStatus.UNSCORED)
    groups = [group(trajectory(1.0), trajectory(1.0), unscored)]
    units = await PolicyGradient().make_units(groups, counters, config)
    assert [(unit.group, unit.reward, len(unit.rows)) for unit in units] == [
        ("g", 1.0, 1),
        ("g", 1.0, 1),
        ("", None, 0),
    ]
    assert counters.as_dict() == {"dropped_rows/unscored": 1}


def test_a_function_over_a_step_that_loses_a_group_is_refused():
    groups = [group(trajectory(1.0), trajectory(0.0))] * 2
    with pytest.raises(InvalidInputError, match="one array for each of 2 groups, got 1"):
        build_samples(groups, StepAdvantages(lambda rewards: batch_scaled_grpo(rewards)[:1]), Counters())


@pytest.mark.parametrize("advantages", [grpo_advantages, dr_grpo, rloo_advantages])
def test_i8_a_group_without_variance_is_dropped_and_counted(advantages):
    counters = Counters()
    assert build_samples([group(*[trajectory(0.1)] * 3)], advantages, counters) == []
    siblings = [trajectory(reward) for reward in (0.1 + 0.2, 0.3, 0.3)]
    assert build_samples([group(*siblings)], advantages, counters) == []
    assert counters.as_dict() == {"dropped_rows/no_variance": 6}


@pytest.mark.parametrize(("kl_weight", "num_rows", "num_dropped"), [(0.0, 2, 3), (0.1, 5, 0)])
async def test_i8_a_group_without_variance_is_kept_for_its_distance_to_a_reference(kl_weight, num_rows, num_dropped):
    counters, config = Counters(), TrainerConfig(kl_weight=kl_weight)
    groups = [group(*[trajectory(0.1)] * 3), group(trajectory(0.0), trajectory(1.0))]
    units = await PolicyGradient().make_units(groups, counters, config)
    rows = [row for unit in units for row in unit.rows]
    assert [float(row.advantages.max()) for row in rows] == [0.0] * (num_rows - 2) + [0.0, 1.0]
    assert sum(len(unit.idle_rows) for unit in units) == counters["dropped_rows/no_variance"] == num_dropped
    assert PolicyGradient().has_variance(groups[0], config) == (num_dropped == 0)


@pytest.mark.parametrize(("kl_weight", "advantages", "num_dropped"), [(0.0, [0.0, 1.0], 2), (0.1, [0.0, 1.0, 0, 0], 0)])
async def test_i8_an_unscored_trajectory_is_kept_for_its_distance_to_a_reference(kl_weight, advantages, num_dropped):
    counters, config = Counters(), TrainerConfig(kl_weight=kl_weight)
    unscored = trajectory(None, status=TrajectoryStatus.UNSCORED)
    groups = [group(trajectory(0.0), unscored, trajectory(1.0)), group(unscored, trajectory(None, status="failed"))]
    units = await PolicyGradient().make_units(groups, counters, config)
    assert [float(row.advantages.max()) for unit in units for row in unit.rows] == advantages
    assert sum(len(unit.idle_rows) for unit in units) == num_dropped
    assert counters["dropped_rows/unscored"] == num_dropped
    assert counters["dropped_rows/failed"] == 1


@pytest.mark.parametrize("advantages", [grpo_advantages, rloo_advantages])
def test_i8_a_group_with_one_usable_member_is_dropped_and_counted(advantages):
    counters = Counters()
    siblings = group(trajectory(1.0), trajectory(None, status=TrajectoryStatus.ABORTED))
    assert build_samples([siblings], advantages, counters) == []
    assert counters.as_dict() == {"dropped_rows/small_group": 1, "dropped_rows/aborted": 1}


@pytest.mark.parametrize("size", [0, 1])
def test_a_group_that_never_had_two_members_is_refused(size):
    """Counted, it would make a run of steps that train nothing."""
    with pytest.raises(InvalidInputError, match=f"group g must have at least 2 trajectories, .* got {size}: sample"):
        build_samples([group(*[trajectory(1.0)] * size)], grpo_advantages, Counters())


def test_i8_a_trajectory_that_sampled_nothing_is_counted():
    counters = Counters()
    rows = build_samples([group(trajectory(1.0, completion=None), trajectory(0.0))], dr_grpo, counters)
    assert len(rows) == 1
    assert counters.as_dict() == {"dropped_rows/nothing_sampled": 1}


def test_a_zero_advantage_in_a_group_with_variance_stays_a_row():
    """It has no gradient of its own, but its tokens belong to the mean that the others are divided by."""
    rows = build_samples([group(trajectory(0.0), trajectory(1.0), trajectory(2.0))], dr_grpo, Counters())
    assert [row.advantages[-1] for row in rows] == [-1, 0, 1]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None])
def test_a_bad_reward_is_refused_with_group_trajectory_and_value(reward):
    siblings = group(trajectory(0.0, name="first"), trajectory(reward, name="second"))
    with pytest.raises(RewardError, match=rf"group g, trajectories first, second: rewards\[1\] must be .*{reward}"):
        build_samples([siblings], grpo_advantages, Counters())


@pytest.mark.parametrize("returned", [[1.0], [np.nan, 1.0], [[1.0, -1.0]]])
def test_an_advantage_function_that_returns_something_else_is_refused(returned):
    with pytest.raises(InvalidInputError, match="must return 2 finite numbers"):
        build_samples([group(trajectory(0.0), trajectory(1.0))], lambda _: np.array(returned), Counters())


members = st.tuples(st.sampled_from(list(TrajectoryStatus)), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())


@settings(max_examples=num_cases(100), derandomize=True)
@given(st.lists(st.lists(members, min_size=2, max_size=6), max_size=4))
def test_i8_for_any_groups_each_trajectory_is_a_row_or_a_count(drawn):
    counters = Counters()
    groups = [
        group(
            *[trajectory(r, status=status, completion=TWO_IDS if has_ids else None) for status, r, has_ids in siblings]
        )
        for siblings in drawn
    ]
    rows = build_samples(groups, rloo_advantages, counters)
    assert len(rows) + counters.total(Event.DROPPED_ROW) == sum(len(siblings) for siblings in drawn)
