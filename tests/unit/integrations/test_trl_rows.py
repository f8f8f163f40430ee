"""What becomes of a trajectory, of its reward and of a prompt on the way to TRL and back."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from support.images import image_span
from support.rows import trajectory
from support.sequences import sampled
from unbroken.errors import InvalidInputError
from unbroken.integrations.trl import RowsByPrompt, TrlDropReason, drop_reason, env_reward, on_trained_rows
from unbroken.integrations.trl.rows import TrlRow, check_rewards_skip
from unbroken.ledger.nodes import Origin, Position
from unbroken.rollout.trajectory import TrajectoryStatus


def two_turns(*, fork: bool = False):
    """The prompt 5 6, the sampled 7 8, a tool's answer 9 and the sampled 4; forked, 4 stands behind 5 6 7 9."""
    one = trajectory(1.0, completion=sampled(7, 8))
    parent = Position(node=1, offset=1 if fork else 2)
    end = one.tree.add_given([9], Origin.BRIDGE, parent=parent)
    one.tree.add_sampled(sampled(4, first=3), parent=end)
    return one


def test_a_row_has_the_ids_as_they_were_and_a_mask_of_what_was_sampled():
    """The example of the module."""
    row = TrlRow.of(two_turns(), filler_id=0)
    assert (row.prompt_ids, row.completion_ids, row.env_mask) == ([5, 6], [7, 8, 9, 4], [1, 1, 0, 1])
    np.testing.assert_array_equal(row.logprobs, [-1 / 8, -2 / 8, np.nan, -3 / 8])


def test_what_was_given_after_the_last_sampled_id_is_left_out():
    one = trajectory(1.0, completion=sampled(7, 8))
    one.tree.add_given([9, 9], Origin.BRIDGE, parent=Position(node=1, offset=2))
    assert TrlRow.of(one, filler_id=0).completion_ids == [7, 8]


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (two_turns(fork=True), TrlDropReason.FORKED),
        (trajectory(1.0, completion=None), TrlDropReason.NOTHING_SAMPLED),
        (trajectory(None, status=TrajectoryStatus.FAILED), TrajectoryStatus.FAILED),
        (trajectory(0.0, status=TrajectoryStatus.TIMEOUT), None),
        (trajectory(None, status=TrajectoryStatus.ABORTED), TrajectoryStatus.ABORTED),
        (trajectory(0.0, status=TrajectoryStatus.MAX_TURNS), None),
        (trajectory(0.0, status=TrajectoryStatus.TRUNCATED), None),
        (two_turns(), None),
    ],
)
def test_what_tells_nothing_of_the_policy_or_is_no_one_row_teaches_nothing(one, reason):
    assert drop_reason(one) is reason
    row = TrlRow.of(one, filler_id=3)
    if reason is None:
        assert 1 in row.env_mask
    else:
        assert (row.prompt_ids, row.completion_ids, row.env_mask) == ([3], [3], [0])
        assert math.isnan(row.logprobs[0])


def test_a_row_with_an_image_is_refused():
    one = trajectory(1.0, completion=None)
    end = one.tree.add_given(
        [1, 1, 2], Origin.BRIDGE, parent=Position(node=0, offset=2), images=[image_span(offset=0, length=2)]
    )
    one.tree.add_sampled(sampled(7), parent=end)
    with pytest.raises(InvalidInputError, match="must hold no images, got 1 in trajectory t"):
        TrlRow.of(one, filler_id=0)


MEMBERS = [trajectory(0.5), two_turns(fork=True), trajectory(None, status=TrajectoryStatus.FAILED), two_turns()]


def call(function, **more):
    logged: dict[str, float] = {}
    returned = function(trajectory=MEMBERS, log_metric=logged.__setitem__, **more)
    return returned, logged


def test_rewards_of_rows_that_are_not_trained_on_are_none():
    returned, logged = call(env_reward, prompts=[], completions=[])
    assert returned == [0.5, None, None, 1.0]
    assert logged["counters/dropped_rows"] == 2
    assert logged["counters/dropped_rows/forked"] == logged["counters/dropped_rows/failed"] == 1
    assert logged["counters/forks"] == 0


def test_a_reward_function_of_ones_own_keeps_its_name_and_hears_everything():
    @on_trained_rows
    def longest(*, completions, answer, **_):
        assert answer == "column"
        return [float(len(text)) for text in completions]

    returned, _ = call(longest, completions=["a", "bb", "ccc", "dddd"], answer="column")
    assert returned == [1.0, None, None, 4.0]
    assert longest.__name__ == "longest"


def test_an_async_reward_function_stays_one():
    @on_trained_rows
    async def four(**_):
        return [1.0, 2.0, 3.0, None]

    returned, _ = call(four)
    assert asyncio.run(returned) == [1.0, None, None, None]


def test_a_wrong_number_of_rewards_is_left_for_trl_to_complain_of():
    assert call(on_trained_rows(lambda **_: [1.0]))[0] == [1.0]


def test_a_reward_function_that_would_score_every_row_is_refused():
    def plain(**_):
        return []

    check_rewards_skip([env_reward, on_trained_rows(plain)])
    with pytest.raises(InvalidInputError, match=r"reward_funcs\[1\] must be env_reward or .*, got plain"):
        check_rewards_skip([env_reward, plain])


def test_a_row_is_found_by_its_prompt():
    rows = [{"prompt": [{"role": "user", "content": "a"}], "answer": 1}, {"prompt": "b", "answer": 2}]
    found = RowsByPrompt([*rows, dict(rows[0])])
    assert found[[{"content": "a", "role": "user"}]]["answer"] == 1
    assert found["b"]["answer"] == 2
    with pytest.raises(InvalidInputError, match="no row of 2 has the prompt 'c'"):
        found["c"]


def test_one_prompt_of_two_tasks_is_refused():
    with pytest.raises(InvalidInputError, match="rows 0 and 1 differ but have the same prompt"):
        RowsByPrompt([{"prompt": "a", "answer": 1}, {"prompt": "a", "answer": 2}])
