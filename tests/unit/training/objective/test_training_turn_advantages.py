"""Advantages of turns: the papers' formulas in plain Python, and the way from an environment's rewards to rows."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from support.fake_renderer import VOCAB_SIZE, FakeRenderer
from support.rollouts import HELLO, MORE
from support.rows import build_samples, trajectory
from support.scripted_env import ScriptedEnv
from support.sequences import sampled
from unbroken.counters import Counters
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import InvalidInputError, InvariantError
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree
from unbroken.rendering.base import ParsedResponse
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_group
from unbroken.rollout.trajectory import SpanReward, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn
from unbroken.training.config import TrainerConfig
from unbroken.training.loss_config import FailedRows, OverlongConfig
from unbroken.training.objective.advantages import TurnAdvantages, turn_grpo, turn_returns
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.objective.samples import RowPolicy, build_trajectories
from unbroken.types import SamplingParams, token_ids

members = st.lists(
    st.lists(st.floats(-4, 4).map(lambda x: round(x, 3)), min_size=1, max_size=4), min_size=2, max_size=5
)
any_rewards = settings(max_examples=num_cases(80), derandomize=True)


def played(*turn_rewards: float, reward: float) -> Trajectory:
    """A trajectory that sampled one id in each turn, 10, 11, ..., with the given ids 5 6 before each."""
    tree, turns, end = TokenTree(), [], None
    for k in range(len(turn_rewards)):
        start = tree.add_given([5, 6], Origin.PROMPT if end is None else Origin.BRIDGE, parent=end)
        sequence = sampled(10 + k)
        end = tree.add_sampled(sequence, parent=start)
        message = {"role": "assistant", "content": ""}
        turns.append(
            Turn(
                prompt_end=start,
                end=end,
                sequence=sequence,
                message=message,
                parsed=ParsedResponse(content=""),
                bridge=None,
                fork=None,
                cut_by=None,
            )
        )
    return replace(trajectory(reward), tree=tree, turns=tuple(turns), turn_rewards=turn_rewards)


def group(*members: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(group_id="g", trajectories=members)


def test_the_worked_example():
    rewards = [np.array([0.0, 1.0]), np.array([0.0])]
    np.testing.assert_allclose(np.concatenate(turn_returns(rewards)), [0.5, 0.5, -0.5])
    found = np.concatenate(turn_grpo(rewards))
    np.testing.assert_allclose(found, np.array([1, 2, -1]) / math.sqrt(2))


@pytest.mark.parametrize("function", [turn_grpo, turn_returns])
def test_trajectories_without_a_turn_have_no_advantages(function):
    """The first prompt already took all ids of the rollout."""
    assert [values.tolist() for values in function([np.zeros(0), np.zeros(0)])] == [[], []]
    assert [len(values) for values in function([np.zeros(0), np.array([1.0, 2.0])])] == [0, 2]


@any_rewards
@given(members)
def test_for_any_turns_turn_grpo_is_a_loop_in_plain_python(drawn):
    everything = [reward for rewards in drawn for reward in rewards]
    mean = sum(everything) / len(everything)
    spread = math.sqrt(sum((reward - mean) ** 2 for reward in everything) / len(everything))
    assume(spread > 1e-3)
    found = turn_grpo([np.array(rewards) for rewards in drawn])
    for rewards, of_member in zip(drawn, found, strict=True):
        for k in range(len(rewards)):
            expected = sum((reward - mean) / spread for reward in rewards[k:])
            assert of_member[k] == pytest.approx(expected, abs=1e-9)


@any_rewards
@given(members)
def test_for_any_turns_turn_returns_is_a_loop_in_plain_python(drawn):
    found = turn_returns([np.array(rewards) for rewards in drawn])
    for rewards, of_member in zip(drawn, found, strict=True):
        for k in range(len(rewards)):
            at_turn = [sum(sibling[k:]) for sibling in drawn]
            assert of_member[k] == pytest.approx(sum(rewards[k:]) - sum(at_turn) / len(drawn), abs=2e-5)


def test_each_turn_of_a_row_has_its_own_advantage_and_the_outcome_belongs_to_the_last_turn():
    """Turn rewards [1, 0] with the whole reward 3, so 2 for the end: [1, 2]. The sibling: [0] and 0.

    Returns [3, 2] and [0], means 1.5 and, for the second turn, 1.
    """
    rows = build_samples([group(played(1, 0, reward=3), played(0, reward=0))], TurnAdvantages(turn_returns), Counters())
    assert rows[0].token_ids.tolist() == [5, 6, 10, 5, 6, 11]
    assert rows[0].advantages.tolist() == [0, 0, 1.5, 0, 0, 1]
    assert rows[1].advantages.tolist() == [0, 0, -1.5]


def test_siblings_with_equal_rewards_and_different_turns_are_trained_on():
    """A sum that is equal may hide turns that are not."""
    counters = Counters()
    rows = build_samples(
        [group(played(1, 0, reward=1), played(0, 1, reward=1))], TurnAdvantages(turn_returns), counters
    )
    assert [row.advantages[[2, 5]].tolist() for row in rows] == [[0, -0.5], [0, 0.5]]
    equal = group(played(1, 0, reward=1), played(1, 0, reward=1))
    assert build_samples([equal], TurnAdvantages(turn_grpo), counters) != []
    assert build_samples([equal], TurnAdvantages(turn_returns), counters) == []
    assert counters.as_dict() == {"dropped_rows/no_variance": 2}


def test_an_environment_without_turn_rewards_is_named():
    with pytest.raises(InvalidInputError, match=r"the 2 of this step have none: .* Continue\(\.\.\., reward=\.\.\.\)"):
        build_samples([group(trajectory(1.0), trajectory(0.0))], TurnAdvantages(turn_grpo), Counters())


def test_a_group_in_which_no_turn_earned_anything_has_only_its_outcomes():
    silent = [replace(played(0, 0, reward=reward), turn_rewards=()) for reward in (1.0, 0.0)]
    other = group(played(1, 0, reward=3), played(0, reward=0))
    rows = build_samples([group(*silent), other], TurnAdvantages(turn_returns), Counters())
    assert [row.advantages[[2, 5]].tolist() for row in rows[:2]] == [[0.5, 0.5], [-0.5, -0.5]]


def test_turn_rewards_must_be_as_many_as_turns():
    with pytest.raises(InvariantError, match="turn_rewards has 2 entries for 0 turns"):
        replace(trajectory(1.0), turn_rewards=(1.0, 0.0))


@pytest.mark.parametrize("returned", [[np.zeros(1), np.zeros(1)], [np.zeros(2)], [np.array([0, np.nan]), np.zeros(1)]])
def test_a_function_of_turns_that_returns_something_else_is_refused(returned):
    with pytest.raises(InvalidInputError, match="the advantage function must return"):
        build_samples(
            [group(played(1, 0, reward=3), played(0, reward=0))], TurnAdvantages(lambda _: returned), Counters()
        )


async def test_the_rewards_that_an_environment_gives_for_turns_reach_the_ids_of_their_turns():
    """Two episodes of two turns: [1, 0] with 0 in the end, and [0, 0] with 2. Returns [1, 0] and [2, 2]."""
    scripts = iter([([replace(MORE, reward=1.0)], 0.0), ([replace(MORE, reward=0.0)], 2.0)])
    siblings = await run_group(
        lambda: (lambda script: ScriptedEnv(script[0], reward=script[1]))(next(scripts)),
        2,
        engine=ScriptedEngine([HELLO] * 4, vocab_size=VOCAB_SIZE),
        renderer=FakeRenderer(),
        sampling=SamplingParams(max_tokens=50),
        limits=Limits(),
    )
    assert [(member.turn_rewards, member.reward) for member in siblings.trajectories] == [
        ((1.0, 0.0), 1.0),
        ((0.0, 0.0), 2.0),
    ]
    objective = PolicyGradient(TurnAdvantages(turn_returns))
    units = await objective.make_units([siblings], Counters(), TrainerConfig())
    for unit, expected in zip(units, ([-0.5, -1.0], [0.5, 1.0]), strict=True):
        (row,) = unit.rows
        by_turn = row.advantages[row.loss_mask].reshape(2, len(HELLO))
        assert (by_turn == np.array(expected)[:, None]).all()


def said(*spans: tuple[int, int, float], num_ids: int = 6) -> Trajectory:
    """A trajectory of two turns that sampled `num_ids` together, with rewards for spans of these."""
    tree, turns, end = TokenTree(), [], None
    for ids in np.split(np.arange(10, 10 + num_ids), [num_ids // 2]):
        start = tree.add_given([5, 6], Origin.PROMPT if end is None else Origin.BRIDGE, parent=end)
        sequence = sampled(*ids.tolist())
        end = tree.add_sampled(sequence, parent=start)
        turns.append(replace(played(0, reward=0).turns[0], prompt_end=start, end=end, sequence=sequence))
    rewards = tuple(SpanReward(*span) for span in spans)
    reward = sum(span.reward for span in rewards)
    return replace(trajectory(reward), tree=tree, turns=tuple(turns), span_rewards=rewards)


def of_ids(trajectories: list[Trajectory], advantages: TurnAdvantages) -> list[list[float]]:
    rows = build_samples([group(*trajectories)], advantages, Counters())
    return [row.advantages[row.loss_mask].tolist() for row in rows]


@any_rewards
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(1, 6), st.integers(-8, 8)), min_size=1, max_size=4, unique_by=lambda each: each[0]
        ),
        min_size=2,
        max_size=4,
    )
)
def test_for_any_spans_an_id_has_the_normalised_rewards_of_the_spans_that_end_at_it_or_after_it(drawn):
    """DeepSeekMath, 4.1.3, id by id: where a span begins does not matter."""
    everything = [reward for spans in drawn for _, reward in spans]
    mean = sum(everything) / len(everything)
    spread = math.sqrt(sum((reward - mean) ** 2 for reward in everything) / len(everything))
    assume(spread > 1e-3)
    found = of_ids([said(*((stop - 1, stop, reward) for stop, reward in sorted(spans))) for spans in drawn], GRPO)
    for spans, row in zip(drawn, found, strict=True):
        expected = [sum((reward - mean) / spread for stop, reward in spans if stop > place) for place in range(6)]
        np.testing.assert_allclose(row, expected, atol=1e-5)


GRPO = TurnAdvantages(turn_grpo)


@pytest.mark.parametrize("function", [turn_grpo, turn_returns])
def test_spans_of_whole_turns_are_rewards_of_turns_to_the_bit(function):
    given = ((0.1, 0.7), (0.3, -0.2), (1.0, 0.0))
    by_span = [said((0, 3, first), (3, 6, second)) for first, second in given]
    by_turn = [
        replace(each, span_rewards=(), turn_rewards=rewards) for each, rewards in zip(by_span, given, strict=True)
    ]
    assert of_ids(by_span, TurnAdvantages(function)) == of_ids(by_turn, TurnAdvantages(function))


def test_ids_after_the_last_span_have_no_advantage_and_a_whole_reward_counts_for_all():
    """Rewards [1, 0] and [0, 1]: mean 1/2, deviation 1/2. Then [1 at 2, 0 at 6] and [1 - 1 at 6]: mean 1/3."""
    assert of_ids([said((0, 2, 1.0), (2, 4, 0.0)), said((0, 2, 0.0), (2, 5, 1.0))], GRPO) == [
        [0, 0, -1, -1, 0, 0],
        [0, 0, 1, 1, 1, 0],
    ]
    whole = of_ids([said((0, 2, 1.0), (0, 6, 0.0)), said((0, 6, 1.0), (4, 6, -1.0))], GRPO)
    np.testing.assert_allclose(whole, np.array([[1, 1, -1, -1, -1, -1], [-1] * 6]) / math.sqrt(2), rtol=1e-6)


def test_a_punishment_for_length_stands_at_the_last_id():
    policy = RowPolicy(overlong=OverlongConfig(max_tokens=6, buffer=4, penalty=2.0))
    units = build_trajectories(
        [group(said((0, 2, 1.0)), said((0, 2, 0.0)))], TurnAdvantages(turn_returns), Counters(), policy=policy
    )
    assert [unit.rows[0].advantages[unit.rows[0].loss_mask].tolist() for unit in units] == [
        [0.5, 0.5, 0, 0, 0, 0],
        [-0.5, -0.5, 0, 0, 0, 0],
    ]
    one = [said((0, 2, 1.0), num_ids=6), said((0, 1, 0.0), num_ids=2)]
    (longer, shorter) = build_trajectories([group(*one)], TurnAdvantages(turn_returns), Counters(), policy=policy)
    assert longer.rows[0].advantages[longer.rows[0].loss_mask].tolist() == [-0.5, -0.5, -1, -1, -1, -1]
    assert shorter.rows[0].advantages[shorter.rows[0].loss_mask].tolist() == [0.5, 0]


def test_the_reward_of_failures_is_one_number_beside_siblings_with_spans():
    """Not a 0 for each of its turns, which nobody gave: [1, -1, -1] has the mean -1/3."""
    failed = replace(
        said(), reward=None, status=TrajectoryStatus.FAILED, error=RuntimeError("no reply"), span_rewards=()
    )
    policy = RowPolicy(failed=FailedRows.TRAIN, failed_reward=-1.0)
    units = build_trajectories([group(said((0, 2, 1.0), (2, 6, -1.0)), failed)], GRPO, Counters(), policy=policy)
    found = [unit.rows[0].advantages[unit.rows[0].loss_mask] for unit in units]
    low, high = -1 / math.sqrt(2), math.sqrt(2)
    np.testing.assert_allclose(found, [[high + low] * 2 + [low] * 4, [low] * 6], rtol=1e-6)


def test_spans_count_the_sampled_ids_alone_where_others_were_given_inside_a_turn():
    """Sampled 10 11, given 8 9, sampled 12; then the second turn 13 14. Places 2 and 3 are the ids 12 and 13."""

    def closed(*spans: tuple[int, int, float]) -> Trajectory:
        tree, turns, end = TokenTree(), [], None
        parts = [sampled(10, 11).then(token_ids([8, 9]), sampled(12)), sampled(13, 14)]
        for sequence in parts:
            start = tree.add_given([5, 6], Origin.PROMPT if end is None else Origin.BRIDGE, parent=end)
            end = tree.add_sampled(sequence, parent=start)
            turns.append(replace(played(0, reward=0).turns[0], prompt_end=start, end=end, sequence=sequence))
        rewards = tuple(SpanReward(*span) for span in spans)
        reward = sum(span.reward for span in rewards)
        return replace(trajectory(reward), tree=tree, turns=tuple(turns), span_rewards=rewards)

    one, other = closed((2, 3, 1.0), (3, 4, -1.0)), closed((2, 3, 0.0), (3, 4, 0.0))
    assert of_ids([one, other], TurnAdvantages(turn_returns)) == [[0, 0, 0, -0.5, 0], [0, 0, 0, 0.5, 0]]
    by_turn = [replace(one, span_rewards=(), turn_rewards=(1.0, -1.0)), replace(other, span_rewards=())]
    assert of_ids(by_turn, TurnAdvantages(turn_returns)) == [[0, 0, 0, -0.5, -0.5], [0, 0, 0, 0.5, 0.5]]
    (row, _) = build_samples([group(one, other)], TurnAdvantages(turn_returns), Counters())
    assert row.advantages[~row.sampled_mask].tolist() == [0] * 6


def test_spans_must_lie_in_what_was_sampled():
    with pytest.raises(InvariantError, match="span_rewards must be of 6 sampled ids"):
        said((0, 7, 1.0))
