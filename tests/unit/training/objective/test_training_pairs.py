"""Which trajectories make a preference pair, which do not, and that each of them is counted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from support.rows import TWO_IDS, group, row, trajectory
from support.sequences import sampled
from unbroken.counters import Counters, Event
from unbroken.errors import InvalidInputError, RewardError
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.tree import export_samples
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.training.config import TrainerConfig
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.objective.pairs import PreferencePair, outside_in, scores_of_ranking


async def pairs_of(*members: Trajectory, counters: Counters | None = None, **options) -> list[PreferencePair]:
    return await OnlineDpo(**options).make_units([group(*members)], counters or Counters(), TrainerConfig())


async def test_the_worked_example_of_the_module():
    counters = Counters()
    (pair,) = await pairs_of(
        trajectory(1.0, completion=sampled(7, 8)),
        trajectory(0.0, completion=sampled(9)),
        trajectory(1.0),
        trajectory(0.5, status=TrajectoryStatus.TRUNCATED),
        trajectory(None, status=TrajectoryStatus.FAILED),
        counters=counters,
    )
    assert [row.token_ids.tolist() for row in pair.rows] == [[5, 6, 7, 8], [5, 6, 9]]
    assert [row.advantages.tolist() for row in pair.rows] == [[0, 0, 1, 1], [0, 0, -1]]
    assert pair.score_margin == 1
    assert counters.as_dict() == {"dropped_rows/failed": 1, "dropped_rows/not_paired": 2}


async def test_all_branches_of_a_forked_trajectory_are_its_side_of_the_pair():
    forked = trajectory(0.0, completion=sampled(7, 8))
    again = forked.tree.add_given([3], Origin.PROMPT, parent=Position(node=0, offset=2))
    forked.tree.add_sampled(sampled(4), parent=again)
    (pair,) = await pairs_of(forked, trajectory(1.0))
    assert [row.token_ids.tolist() for row in pair.rejected] == [[5, 6, 7, 8], [5, 6, 3, 4]]
    assert [row.advantages.tolist() for row in pair.rejected] == [[0, 0, -1, -1], [0, 0, 0, -1]]


async def test_i8_equal_scores_teach_nothing_and_are_counted():
    counters = Counters()
    assert await pairs_of(*[trajectory(0.5)] * 3, counters=counters) == []
    assert counters.as_dict() == {"dropped_rows/no_variance": 3}


async def test_i8_a_group_with_one_member_left_is_counted():
    counters = Counters()
    lost = trajectory(None, status=TrajectoryStatus.ABORTED)
    assert await pairs_of(trajectory(1.0), lost, counters=counters) == []
    assert counters.as_dict() == {"dropped_rows/small_group": 1, "dropped_rows/aborted": 1}


async def test_a_missing_member_takes_its_score_with_it():
    """The failed one has the worst score of all, and is neither rejected nor judged."""
    failed = trajectory(-100.0, status=TrajectoryStatus.FAILED, completion=sampled(1))
    judged = []

    async def judge(members: Sequence[Trajectory]) -> list[float]:
        judged.append([member.reward for member in members])
        return [member.reward for member in members]

    for how in (None, judge):
        (pair,) = await pairs_of(failed, trajectory(0.0), trajectory(1.0, completion=sampled(9)), judge=how)
        assert [row.token_ids.tolist() for row in pair.rows] == [[5, 6, 9], [5, 6, 7, 8]]
        assert pair.score_margin == 1
    assert judged == [[0.0, 1.0]]


async def test_i8_a_trajectory_that_sampled_nothing_is_in_no_pair_and_counted():
    counters = Counters()
    assert await pairs_of(trajectory(1.0), trajectory(0.0, completion=None), counters=counters) == []
    assert counters.as_dict() == {"dropped_rows/nothing_sampled": 1, "dropped_rows/small_group": 1}


async def test_a_judge_takes_the_place_of_the_rewards():
    async def shortest_first(members: Sequence[Trajectory]) -> list[float]:
        lengths = [len(export_samples(member.tree, 0.0)[0].token_ids) for member in members]
        return scores_of_ranking(np.argsort(lengths, kind="stable").tolist())

    long, short = trajectory(1.0, completion=sampled(7, 8, 9)), trajectory(0.0, completion=sampled(4))
    (pair,) = await pairs_of(long, trajectory(0.5), short, judge=shortest_first)
    assert [row.token_ids.tolist() for row in pair.rows] == [[5, 6, 4], [5, 6, 7, 8, 9]]
    assert pair.score_margin == 2


@pytest.mark.parametrize(
    ("scores", "message"),
    [([1.0], "one score for each of 2 members of group g, got 1"), ([1.0, float("nan")], "group g: .*nan")],
)
async def test_a_judge_that_does_not_give_each_member_a_number_is_refused(scores, message):
    async def judge(_members: Sequence[Trajectory]) -> list[float]:
        return scores

    with pytest.raises(RewardError, match=message):
        await pairs_of(trajectory(1.0), trajectory(0.0), judge=judge)


@pytest.mark.parametrize("returned", [[(1, 0)], [(0, 2)], [(0, 0)]])
async def test_pairs_that_are_not_of_members_or_the_wrong_way_round_are_refused(returned):
    with pytest.raises(InvalidInputError, match="pairs of indices, the one with the higher score first"):
        await pairs_of(trajectory(1.0), trajectory(0.0), pairs=lambda _: returned)


def test_a_pair_whose_advantages_are_not_its_signs_is_refused():
    good, bad = row([1, 2], sampled=[1]), row([1, 2], sampled=[1], advantage=-1.0)
    with pytest.raises(InvalidInputError, match=r"PreferencePair\.rejected must be .* advantage -1 .*, got 1 rows"):
        PreferencePair(chosen=(good,), rejected=(good,), score_margin=1.0)
    with pytest.raises(InvalidInputError, match=r"PreferencePair\.chosen .* got 0 rows"):
        PreferencePair(chosen=(), rejected=(bad,), score_margin=1.0)
    with pytest.raises(InvalidInputError, match="score_margin must be > 0, got 0"):
        PreferencePair(chosen=(good,), rejected=(bad,), score_margin=0)


members = st.tuples(st.sampled_from(list(TrajectoryStatus)), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())


@settings(max_examples=num_cases(80), derandomize=True)
@given(st.lists(st.lists(members, min_size=2, max_size=6), max_size=4))
async def test_i8_for_any_groups_each_trajectory_is_in_a_pair_or_a_count(drawn):
    counters = Counters()
    groups = [
        group(
            *[trajectory(r, status=status, completion=TWO_IDS if has_ids else None) for status, r, has_ids in siblings]
        )
        for siblings in drawn
    ]
    pairs = await OnlineDpo(pairs=outside_in).make_units(groups, counters, TrainerConfig())
    assert 2 * len(pairs) + counters.total(Event.DROPPED_ROW) == sum(len(siblings) for siblings in drawn)
    assert all(np.isfinite(pair.score_margin) for pair in pairs)
