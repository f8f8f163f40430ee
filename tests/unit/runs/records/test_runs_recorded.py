"""Files of rollouts, read back: the rows of any tree are those that were trained on."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.rows import trajectory
from support.sequences import sampled
from unbroken.errors import InvalidInputError
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.tree import TokenTree, export_samples
from unbroken.rendering.base import ParsedResponse
from unbroken.rollout.trajectory import SpanReward, Trajectory, TrajectoryGroup, Turn
from unbroken.runs.records.record import write_groups
from unbroken.runs.records.recorded import read_step
from unbroken.types import TrainingSample

HEAD = {"step": 0, "rank": 0, "num_processes": 1}


def play(moves: list[tuple[int, int, int, bool]]) -> Trajectory:
    """A trajectory whose nodes are attached to any place of those before: (node, offset, number of ids, sampled)."""
    tree, turns = TokenTree(), []
    tree.add_given([1, 2, 3], Origin.PROMPT, parent=None)
    for number, (node, offset, length, is_sampled) in enumerate(moves):
        node %= len(tree.nodes)
        parent = Position(node=node, offset=offset % len(tree.nodes[node].token_ids) + 1)
        ids = [10 * number + k for k in range(length)]
        if not is_sampled:
            tree.add_given(ids, Origin.BRIDGE if number % 2 else Origin.PROMPT, parent=parent)
            continue
        sequence = sampled(*ids, versions=[number % 3] * length)
        end = tree.add_sampled(sequence, parent=parent)
        ends = {"prompt_end": parent, "end": end}
        read = {"message": {"role": "assistant", "content": "x"}, "parsed": ParsedResponse(content="x")}
        turns.append(Turn(sequence=sequence, bridge=None, fork=None, cut_by=None, **ends, **read))
    rewards = tuple(float(k) for k in range(len(turns)))
    member = replace(trajectory(0.5), tree=tree, turns=tuple(turns), turn_rewards=rewards)
    spans = (SpanReward(0, 1, 0.1), SpanReward(0, member.num_sampled, 1e-30)) if turns else ()
    return replace(member, span_rewards=spans, reward_parts={"f": 0.1}, reward_weights={"f": 1 / 3, "g": 2.0})


def rows_of(member: Trajectory) -> list[TrainingSample]:
    """Its rows, with another advantage for each turn."""
    return export_samples(member.tree, {turn.end.node: float(k + 1) for k, turn in enumerate(member.turns)})


@settings(max_examples=60)
@example(moves=[(0, 2, 2, True), (1, 1, 1, False), (1, 1, 2, True)])  # an unanswered prompt behind what two rows share
@given(moves=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 4), st.booleans()), max_size=8))
def test_the_rows_of_any_tree_are_read_back_bit_for_bit(tmp_path_factory, moves):
    member = play(moves)
    groups = [TrajectoryGroup(group_id="0-0-1", trajectories=(member, replace(member, trajectory_id="u", reward=1.5)))]
    step = read_step(write_groups(tmp_path_factory.mktemp("rollouts") / "rollouts", HEAD, groups))
    (again,) = step.make_groups()
    assert (again.group_id, again.rewards) == ("0-0-1", (0.5, 1.5))
    assert step.find_changed_texts() is None
    for found in again.trajectories:
        for name in ("status", "turn_rewards", "span_rewards", "reward_parts", "reward_weights"):
            assert getattr(found, name) == getattr(member, name), name
        for row, own in zip(rows_of(found), rows_of(member), strict=True):
            for name in ("token_ids", "sampled_mask", "loss_mask", "policy_versions", "advantages"):
                assert np.array_equal(getattr(row, name), getattr(own, name)), name
            assert row.rollout_logprobs.tobytes() == own.rollout_logprobs.tobytes()
            assert row.temperature == own.temperature


def test_a_record_whose_parts_do_not_fit_is_refused_with_its_trajectory(tmp_path):
    member = play([(0, 2, 3, True)])
    path = write_groups(tmp_path / "rollouts", HEAD, [TrajectoryGroup(group_id="g", trajectories=(member,))])
    step = read_step(path)
    broken = json.loads(json.dumps(step.records))
    broken[0]["rows"][0]["rollout_logprobs"].pop()
    with pytest.raises(InvalidInputError, match=r"trajectory t is none: .*rollout_logprobs"):
        replace(step, records=broken).make_groups()
