"""Messages and ids kept in step: bridges, forks, closings, and what is counted."""

from dataclasses import replace

import numpy as np
import pytest

from support.fake_renderer import CALL, CALL_END, END, HEADERS, NEWLINE, OTHER_END, FakeRenderer, call_ids, encode
from support.scripted_env import ScriptedEnv
from unbroken.engines.scripted import ScriptedEngine
from unbroken.ledger.nodes import ForkReason, Origin
from unbroken.ledger.tree import export_samples
from unbroken.rendering.base import Bridge, Refusal, RefusalReason
from unbroken.rollout.env import Continue, Rewrite
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.tools import ToolStatus
from unbroken.rollout.trajectory import Trajectory
from unbroken.types import SamplingParams

USER, ASSISTANT, TOOL = HEADERS["user"], HEADERS["assistant"], HEADERS["tool"]
MORE = Continue(messages=[{"role": "user", "content": "more"}])
BRIDGE_TO_MORE = [NEWLINE, USER, *encode("more"), END, NEWLINE, ASSISTANT]
PROMPT = [USER, *encode("hi"), END, NEWLINE, ASSISTANT]
COMPACT_CALL = [*call_ids("look", {"row": 1}), END]
SOUP = [0xFF, 0xC3, ASSISTANT, 0x80, CALL_END, END]
"""Broken UTF-8 and control ids in the wrong places: decoding and encoding this again gives other ids."""


async def play(outcomes, replies, *, refusals=(), max_tokens=50) -> tuple[Trajectory, ScriptedEngine]:
    """The engine sees which prompts leave the history: exactly those that the trajectory calls forks (I1)."""
    engine = ScriptedEngine(replies, allow_forks=True)
    trajectory = await run_rollout(
        ScriptedEnv(outcomes),
        engine=engine,
        renderer=FakeRenderer(refusals=refusals),
        sampling=SamplingParams(max_tokens=max_tokens),
        limits=Limits(),
    )
    assert trajectory.error is None
    assert len(engine.forks) == sum(turn.fork is not None for turn in trajectory.turns)
    return trajectory, engine


def counts(trajectory: Trajectory) -> dict[str, int]:
    return {key: n for key, n in trajectory.counters.as_dict().items() if not key.startswith("status/")}


async def test_i1_the_next_prompt_is_all_ids_so_far_and_the_bridge():
    trajectory, engine = await play([MORE], [SOUP, [7, END]])
    assert engine.requests[0].prompt_ids.tolist() == PROMPT
    assert engine.requests[1].prompt_ids.tolist() == [*PROMPT, *SOUP, *BRIDGE_TO_MORE]
    assert counts(trajectory) == {"bridges/derived": 1}
    assert isinstance(trajectory.turns[1].bridge, Bridge)
    assert trajectory.turns[1].fork is None


async def test_i4_ids_that_would_not_survive_decoding_reach_the_trainer_as_they_were_sampled():
    trajectory, _ = await play([MORE, MORE], [SOUP, COMPACT_CALL, SOUP])
    [row] = export_samples(trajectory.tree, 1.0)
    assert row.token_ids[row.loss_mask].tolist() == [*SOUP, *COMPACT_CALL, *SOUP]
    rendered = FakeRenderer().render_ids(trajectory.messages)
    assert rendered.tolist() != row.token_ids.tolist()


@pytest.mark.parametrize(
    ("completion", "given", "closing"),
    [
        ([7, END], BRIDGE_TO_MORE, {}),
        ([7, 7], [END, *BRIDGE_TO_MORE], {"closings/truncated": 1, "truncations/turn": 1}),
        ([7, OTHER_END], [END, *BRIDGE_TO_MORE], {"closings/foreign_stop": 1}),
    ],
)
async def test_i7_a_turn_is_closed_by_given_ids_before_anything_follows(completion, given, closing):
    trajectory, _ = await play([MORE], [completion, [8, END]], max_tokens=2)
    path = trajectory.tree.path(trajectory.turns[-1].end)
    assert path.token_ids.tolist() == [*PROMPT, *completion, *given, 8, END]
    given_start = len(PROMPT) + len(completion)
    assert not path.sampled_mask[given_start : given_start + len(given)].any()
    assert counts(trajectory) == {"bridges/derived": 1} | closing


async def test_a_wrong_header_as_stop_id_forks_before_it():
    trajectory, engine = await play([MORE], [[7, TOOL], [8, END]])
    assert engine.requests[1].prompt_ids.tolist() == [*PROMPT, 7, END, *BRIDGE_TO_MORE]
    assert trajectory.turns[1].fork is ForkReason.WRONG_HEADER
    assert counts(trajectory) == {"closings/foreign_stop": 1, "forks/wrong_header": 1}
    first, second = export_samples(trajectory.tree, 1.0)
    assert first.token_ids.tolist() == [*PROMPT, 7, TOOL]
    assert first.loss_mask.tolist() == [False] * len(PROMPT) + [True, True]
    assert second.token_ids[second.loss_mask].tolist() == [8, END]


async def test_a_refused_bridge_renders_afresh_and_forks_where_the_rendering_leaves_the_record():
    trajectory, engine = await play([MORE], [COMPACT_CALL, [8, END]], refusals=[RefusalReason.UNDERIVABLE])
    fresh = FakeRenderer().render(trajectory.messages[:-1]).token_ids.tolist()
    assert engine.requests[1].prompt_ids.tolist() == fresh
    assert counts(trajectory) == {"forks/refused_bridge": 1, "refusals/underivable": 1}
    turn = trajectory.turns[1]
    assert turn.fork is ForkReason.REFUSED_BRIDGE
    assert turn.bridge == Refusal(reason=RefusalReason.UNDERIVABLE)
    shared = len(PROMPT) + len([CALL, *encode('{"name":')])
    path = trajectory.tree.path(turn.end)
    assert path.sampled_mask.tolist() == [
        *[False] * len(PROMPT),
        *[True] * (shared - len(PROMPT)),
        *[False] * (len(fresh) - shared),
        True,
        True,
    ]
    assert path.origins[shared] is Origin.PROMPT


async def test_a_refused_bridge_whose_fresh_rendering_extends_the_record_is_no_fork():
    trajectory, engine = await play([MORE], [[7, END], [8, END]], refusals=[RefusalReason.UNSUPPORTED])
    assert engine.requests[1].prompt_ids.tolist() == [*PROMPT, 7, END, *BRIDGE_TO_MORE]
    assert counts(trajectory) == {"bridges/rendered": 1, "refusals/unsupported": 1}
    path = trajectory.tree.path(trajectory.turns[1].end)
    assert path.origins[len(PROMPT) + 2] is Origin.BRIDGE
    assert len(trajectory.tree.leaves()) == 1


@pytest.mark.parametrize(
    "say_more",
    [
        MORE,
        Rewrite(
            messages=[
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "\x07\x07"},
                {"role": "user", "content": "more"},
            ]
        ),
    ],
)
async def test_i7_i8_a_cut_turn_that_a_fresh_rendering_closes_is_counted_as_closed(say_more):
    trajectory, engine = await play([say_more], [[7, 7], [8, END]], refusals=[RefusalReason.UNSUPPORTED], max_tokens=2)
    assert engine.requests[1].prompt_ids.tolist() == [*PROMPT, 7, 7, END, *BRIDGE_TO_MORE]
    counted = counts(trajectory)
    counted.pop("refusals/unsupported", None)
    assert counted == {"bridges/rendered": 1, "closings/truncated": 1, "truncations/turn": 1}


async def test_i8_a_turn_cut_in_its_reasoning_that_a_fresh_rendering_closes_is_counted_as_that():
    class Reasoning(FakeRenderer):
        def parse_response(self, completion_ids, *, prompt_ids=None, tools=()):
            return replace(super().parse_response(completion_ids), reasoning_complete=False)

    trajectory = await run_rollout(
        ScriptedEnv([MORE]),
        engine=ScriptedEngine([[7, 7], [8, END]]),
        renderer=Reasoning(refusals=[RefusalReason.UNSUPPORTED]),
        sampling=SamplingParams(max_tokens=2),
        limits=Limits(),
    )
    assert trajectory.counters["closings/reasoning"] == 1


@pytest.mark.parametrize("refusals", [[], [RefusalReason.UNSUPPORTED], [RefusalReason.UNDERIVABLE]])
async def test_i8_a_prompt_that_no_turn_answers_counts_as_nothing(refusals):
    trajectory = await run_rollout(
        ScriptedEnv([MORE]),
        engine=ScriptedEngine([COMPACT_CALL], context_length=len(PROMPT) + len(COMPACT_CALL) + 3),
        renderer=FakeRenderer(refusals=refusals),
        sampling=SamplingParams(max_tokens=50),
        limits=Limits(),
    )
    assert len(trajectory.turns) == 1
    assert trajectory.counters.as_dict() == {"limits/context": 1, "status/max_tokens": 1}


async def test_a_rewritten_history_forks_and_is_counted():
    rewritten = Rewrite(messages=[{"role": "user", "content": "hello"}])
    trajectory, engine = await play([rewritten], [[7, END], [8, END]])
    assert engine.requests[1].prompt_ids.tolist() == [USER, *encode("hello"), END, NEWLINE, ASSISTANT]
    assert trajectory.turns[1].fork is ForkReason.REWRITTEN_HISTORY
    assert trajectory.turns[1].bridge is None
    assert counts(trajectory) == {"forks/rewritten_history": 1}
    assert [message["content"] for message in trajectory.messages] == ["hello", "\x08"]
    first, second = export_samples(trajectory.tree, 1.0)
    assert first.token_ids[first.loss_mask].tolist() == [7, END]
    assert second.token_ids[second.loss_mask].tolist() == [8, END]


async def test_going_back_to_the_first_prompt_adds_a_second_branch_to_it():
    again = Rewrite(messages=[{"role": "user", "content": "hi"}])
    trajectory, engine = await play([again, MORE], [[7, END], [8, END], [9, END]])
    assert engine.requests[1].prompt_ids.tolist() == PROMPT
    assert trajectory.turns[0].prompt_end == trajectory.turns[1].prompt_end
    assert counts(trajectory) == {"bridges/derived": 1, "forks/rewritten_history": 1}
    assert engine.requests[2].prompt_ids.tolist() == [*PROMPT, 8, END, *BRIDGE_TO_MORE]


async def test_a_history_that_shares_nothing_starts_a_sequence_of_its_own():
    trajectory, _ = await play([Rewrite(messages=[{"role": "system", "content": "s"}])], [[7, END], [8, END]])
    assert [node.parent is None for node in trajectory.tree.nodes] == [True, False, True, False]


async def test_a_history_rewritten_to_what_the_bridge_would_have_made_is_a_bridge():
    rewrite = Rewrite(
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "\x07"},
            {"role": "user", "content": "more"},
        ]
    )
    trajectory, engine = await play([rewrite], [[7, END], [8, END]])
    assert engine.requests[1].prompt_ids.tolist() == [*PROMPT, 7, END, *BRIDGE_TO_MORE]
    assert counts(trajectory) == {"bridges/rendered": 1}


async def test_message_text_in_a_bridge_is_told_apart_from_what_the_template_wrote():
    answer = Continue(messages=[{"role": "tool", "content": "42", "tool_call_id": "call00000"}])
    trajectory, _ = await play([answer], [COMPACT_CALL, [8, END]])
    path = trajectory.tree.path(trajectory.turns[1].end)
    text = np.flatnonzero((path.message_indices >= 0) & np.array([o is Origin.BRIDGE for o in path.origins]))
    assert bytes(path.token_ids[text].tolist()) == b"42"
    assert path.message_indices[text].tolist() == [2, 2]
    assert trajectory.messages[2]["content"] == "42"


async def test_failed_calls_and_failed_tools_are_counted_by_reason():
    errors = (ToolStatus.ERROR, ToolStatus.UNKNOWN_TOOL, ToolStatus.ERROR)
    answers = Continue(messages=[{"role": "user", "content": "x"}], tool_errors=errors)
    broken = [CALL, *encode("{"), CALL_END, CALL, *encode("{}"), CALL_END, CALL, *encode("[")]
    trajectory, _ = await play([answers], [[*broken, END], [8, END]])
    assert counts(trajectory) == {
        "bridges/derived": 1,
        "parse_failures/invalid_json": 1,
        "parse_failures/missing_name": 1,
        "parse_failures/unclosed": 1,
        "tool_errors/error": 2,
        "tool_errors/unknown_tool": 1,
    }


async def test_call_ids_are_unique_in_the_conversation_also_beside_those_it_began_with():
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {}}}
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "call00001"},
    ]
    engine = ScriptedEngine([[*call_ids("look", {}), *call_ids("look", {}), END], COMPACT_CALL, [8, END]])
    trajectory = await run_rollout(
        ScriptedEnv([MORE, MORE], messages=history),
        engine=engine,
        renderer=FakeRenderer(),
        sampling=SamplingParams(max_tokens=200),
        limits=Limits(),
    )
    ids = [call["id"] for message in trajectory.messages for call in message.get("tool_calls", [])]
    assert ids == ["call00001", "call00000", "call00002", "call00003"]
