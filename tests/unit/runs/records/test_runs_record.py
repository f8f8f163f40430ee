"""Records of trajectories: all that is known of each id can be read back from plain JSON."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.fake_renderer import END, call_ids, encode
from support.images import image_span
from support.rollouts import HELLO, play
from support.rows import trajectory
from support.scripted_env import ScriptedEnv
from support.sequences import sampled
from unbroken.engines.scripted import ScriptedEngine
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.tree import TokenTree, export_samples
from unbroken.rollout.env import Rewrite
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import tool
from unbroken.rollout.trajectory import Trajectory
from unbroken.runs.export.rows import Rollout, RowForm, make_rows
from unbroken.runs.records.paths import find_runs
from unbroken.runs.records.record import RecordedRow, make_record, to_json
from unbroken.types import EncodedImage
from unbroken.untrusted import check_json


def record(member: Trajectory, *, advantage: float | None = None, scored: float | None = None) -> dict[str, Any]:
    """The record of a trajectory, through JSON; the trainer's logprobs are all `scored`."""
    plain = member.tree.rows
    trained = [None] * len(plain) if advantage is None else export_samples(member.tree, advantage)
    rows = [
        RecordedRow(
            path=path,
            row=row,
            trained=of_row,
            trainer_logprobs=None if scored is None else np.where(row.sampled_mask, np.float32(scored), np.nan),
        )
        for (path, row), of_row in zip(plain, trained, strict=True)
    ]
    found: dict[str, Any] = json.loads(json.dumps(make_record("0-0-3", member, rows), allow_nan=False))
    return found


def expand(runs: list[list[Any]], length: int, missing: Any) -> list[Any]:
    values = [missing] * length
    for start, stop, value in runs:
        values[start:stop] = [value] * (stop - start)
    return values


def test_the_worked_example():
    tree = TokenTree()
    prompt = tree.add_given([1, 2], Origin.PROMPT, parent=None)
    turn = tree.add_sampled(sampled(3, 4, versions=[7, 7]), parent=prompt)
    bridge = tree.add_given([5], Origin.BRIDGE, parent=turn)
    tree.add_sampled(sampled(6, versions=[8], first=3), parent=bridge)
    (row,) = record(replace(trajectory(1.0), tree=tree), advantage=0.5, scored=-0.1)["rows"]
    assert row == {
        "token_ids": [1, 2, 3, 4, 5, 6],
        "turns": [],  # this trajectory has none beside its tree
        "segments": [
            {"start": 0, "stop": 2, "origin": "prompt", "node": 0},
            {"start": 2, "stop": 4, "origin": "sampled", "node": 1},
            {"start": 4, "stop": 5, "origin": "bridge", "node": 2},
            {"start": 5, "stop": 6, "origin": "sampled", "node": 3},
        ],
        "message_indices": [],
        "rollout_logprobs": [-0.125, -0.25, -0.375],
        "trainer_logprobs": [-0.1, -0.1, -0.1],
        "entropies": None,
        "ranks": None,
        "policy_versions": [[2, 4, 7], [5, 6, 8]],
        "temperature": 1.0,
        "is_trained": True,
        "loss": [[2, 4], [5, 6]],
        "clipped": None,
        "corrected": None,
        "advantages": [[2, 4, 0.5], [5, 6, 0.5]],
        "images": [],
    }


def test_each_branch_is_a_row_and_shared_ids_are_in_the_loss_of_the_first():
    tree = TokenTree()
    prompt = tree.add_given([1, 2], Origin.PROMPT, parent=None, images=[image_span(offset=0, length=1)])
    tree.add_sampled(sampled(3, 4), parent=prompt)
    tree.add_sampled(sampled(8), parent=tree.add_given([9], Origin.PROMPT, parent=Position(node=1, offset=1)))
    first, second = record(replace(trajectory(1.0), tree=tree), advantage=-1.0)["rows"]
    assert (first["token_ids"], second["token_ids"]) == ([1, 2, 3, 4], [1, 2, 3, 9, 8])
    assert (first["loss"], second["loss"]) == ([[2, 4]], [[4, 5]])
    assert [each["node"] for each in second["segments"]] == [0, 1, 2, 3]
    assert second["rollout_logprobs"] == [first["rollout_logprobs"][0], -0.125]
    assert second["images"] == [{"start": 0, "stop": 1, "sha256": image_span(offset=0, length=1).sha256}]


def test_a_trajectory_that_is_not_trained_has_no_advantages_and_one_that_failed_its_error():
    (row,) = record(trajectory(1.0))["rows"]
    assert (row["is_trained"], row["advantages"], row["loss"], row["trainer_logprobs"]) == (False, [], [[2, 4]], None)
    failed = replace(trajectory(None, completion=None), error=RuntimeError("boom"))
    assert (record(failed)["rows"], record(failed)["error"], record(failed)["reward"]) == (
        [],
        "RuntimeError: boom",
        None,
    )


@tool
async def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


async def test_an_episode_with_a_tool_has_its_messages_turns_and_the_message_of_each_given_id():
    env = ToolEnv([{"role": "user", "content": "2x21?"}], [double], lambda messages: messages[-1]["content"] == "42")
    member = await play(env, ScriptedEngine([[*call_ids("double", {"number": 21}), END], [*encode("42"), END]]))
    found = record(member, advantage=1.0)
    assert [message["role"] for message in found["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert found["messages"][1]["tool_calls"][0]["function"] == {"name": "double", "arguments": {"number": 21}}
    assert found["tools"] == [double.schema]
    assert found["counters"] == {"bridges/derived": 1, "status/completed": 1}
    assert (found["status"], found["reward"], found["group"]) == ("completed", 1.0, "0-0-3")
    first, second = found["turns"]
    assert (first["bridge"], second["bridge"], second["refusal"], second["fork"]) == (False, True, None, None)
    assert (first["reward"], second["reward"]) == (None, None)
    assert (first["call_statuses"], second["call_statuses"], second["finish_reason"]) == (["ok"], [], "stop")
    assert [call["name"] for call in first["times"]["calls"]] == ["double"]
    assert 0 <= first["times"]["start_s"] <= first["times"]["calls"][0]["start_s"] <= first["times"]["answered_s"]
    assert first["closing"] is second["closing"] is None
    (row,) = found["rows"]
    assert [each["origin"] for each in row["segments"]] == ["prompt", "sampled", "bridge", "sampled"]
    assert sum(turn["num_sampled"] for turn in found["turns"]) == len(row["rollout_logprobs"]) == member.num_sampled
    path = member.tree.path(member.tree.leaves()[0])
    assert expand(row["message_indices"], len(row["token_ids"]), -1) == path.message_indices.tolist()
    assert 2 in path.message_indices  # text of the tool's reply, in the bridge


async def test_a_rewritten_history_says_why_the_next_turn_forked():
    env = ScriptedEnv([Rewrite(messages=[{"role": "user", "content": "anew"}], reward=0.25)])
    found = record(await play(env, ScriptedEngine([HELLO, HELLO], allow_forks=True)))
    assert [turn["fork"] for turn in found["turns"]] == [None, "rewritten_history"]
    assert [turn["reward"] for turn in found["turns"]] == [0.25, 0.0]
    assert len(found["rows"]) == 2


async def test_a_row_has_the_turns_of_its_own_branch():
    env = ScriptedEnv([Rewrite(messages=[{"role": "user", "content": "anew"}], reward=0.25)])
    found = record(await play(env, ScriptedEngine([HELLO, HELLO], allow_forks=True)))
    assert [row["turns"] for row in found["rows"]] == [[0], [1]]
    head = {"step": 0, "model": "tiny"}
    rows = make_rows(Rollout(kind="training", head=head, record=found), RowForm.ROWS, Counter())
    assert [(row["num_turns"], len(row["finish_reasons"])) for row in rows] == [(1, 1), (1, 1)]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12))
def test_runs_expand_to_the_values_they_were_made_of(pairs):
    values = np.array([value for value, _ in pairs], dtype=np.int32)
    where = np.array([is_there for _, is_there in pairs], dtype=np.bool_)
    runs = find_runs(values, where=where)
    assert expand(runs, len(pairs), None) == [value if is_there else None for value, is_there in pairs]
    assert all(a[1] < b[0] or a[2] != b[2] for a, b in itertools.pairwise(runs))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_logprobs_are_the_same_in_float32(logprobs):
    tree = TokenTree()
    ids = range(len(logprobs))
    tree.add_sampled(
        replace(sampled(*ids), rollout_logprobs=logprobs), parent=tree.add_given([1], Origin.PROMPT, parent=None)
    )
    (row,) = record(replace(trajectory(1.0), tree=tree))["rows"]
    assert np.array(row["rollout_logprobs"], dtype=np.float32).tolist() == np.array(logprobs, dtype=np.float32).tolist()


def test_messages_keep_what_json_has_and_images_leave_their_place():
    cat = EncodedImage(b"cat")
    parts = [{"type": "text", "text": "look"}, {"type": "image", "image": object()}, {"type": "image", "image": cat}]
    message = {"role": "user", "content": parts, "scores": (1, float("nan"), None, object)}
    assert to_json(message) == {
        "role": "user",
        "content": [{"type": "text", "text": "look"}, {"type": "image"}, {"type": "image", "sha256": cat.sha256}],
        "scores": [1, "nan", None, str(object)],
    }


def test_arguments_that_no_reader_takes_are_text():
    """A policy may call a tool with a number of 400 digits, or with a hundred lists in each other."""
    deep: Any = 10**400
    for _ in range(120):
        deep = [deep]
    found = to_json({"number": 10**400, "deep": deep, "flag": True, "small": -(2**62)})
    check_json({"messages": [{"function": found}]})
    assert found == {"number": str(10**400), "deep": found["deep"], "flag": True, "small": -(2**62)}
