"""A request is matched with what is recorded: the same turn under a tolerance with a name, or another message."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unbroken.ledger.forest import Forest, Match, TurnSettings
from unbroken.ledger.matching import Tolerance
from unbroken.ledger.nodes import ForkReason

SETTINGS = TurnSettings(tools="t", options="o")
SYSTEM = {"role": "system", "content": "You look things up."}
USER = {"role": "user", "content": "What is in cell 4?"}
REPLY = {
    "role": "assistant",
    "content": "I will look.",
    "reasoning_content": "Cell 4 is behind the tool.",
    "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"cell": 4, "deep": True}}}
    ],
}
DELIVERED = {
    **REPLY,
    "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": '{"cell": 4, "deep": true}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00000", "content": "17"}


def record(forest: Forest, given: list[Any], reply: Any, delivered: Any = None, *, turn: int, after: int | None = None):
    node = after
    for message in given:
        node = forest.add_given(message, parent=node)
    assert node is not None
    return forest.add_reply(reply, delivered or reply, parent=node, turn=turn, settings=SETTINGS)


@pytest.fixture
def forest() -> Forest:
    forest = Forest()
    record(forest, [SYSTEM, USER], REPLY, DELIVERED, turn=0)
    return forest


def match(forest: Forest, *messages: Any, settings: TurnSettings = SETTINGS) -> Match:
    return forest.match([json.loads(json.dumps(message)) for message in messages], settings)


def changed(**fields: Any) -> dict[str, Any]:
    return {**DELIVERED, **fields}


def call(**fields: Any) -> list[dict[str, Any]]:
    return [{**DELIVERED["tool_calls"][0], **fields}]


def test_the_first_request_begins_a_conversation() -> None:
    found = match(Forest(), SYSTEM, USER)
    assert (found.node, found.num_matched, found.turn, found.fork) == (None, 0, None, None)
    assert not found.continues


def test_a_reply_sent_back_as_delivered_continues_its_turn(forest: Forest) -> None:
    found = match(forest, SYSTEM, USER, DELIVERED, RESULT)
    assert found.continues
    assert (found.turn, found.num_matched, found.tolerances) == (0, 3, frozenset())
    assert found.messages == (SYSTEM, USER, REPLY, RESULT)


@pytest.mark.parametrize(
    ("sent", "tolerance"),
    [
        ({k: v for k, v in DELIVERED.items() if k != "reasoning_content"}, Tolerance.DROPPED_REASONING),
        (changed(reasoning_content=None), Tolerance.DROPPED_REASONING),
        (changed(content="I will look.\n"), Tolerance.WHITE_SPACE),
        (changed(reasoning_content="\nCell 4 is behind the tool.\n"), Tolerance.WHITE_SPACE),
        (changed(content=[{"type": "text", "text": "I will look."}]), Tolerance.CONTENT_FORM),
        (
            changed(tool_calls=call(function={"name": "look", "arguments": '{"deep":true,"cell":4.0}'})),
            Tolerance.ARGUMENT_SPELLING,
        ),
        (changed(annotations=[], refusal=None, audio=None), Tolerance.EXTRA_FIELDS),
        *[
            (changed(reasoning_content=None, content=content), Tolerance.FOLDED_REASONING)
            for content in (
                "<think>\nCell 4 is behind the tool.\n</think>\n\nI will look.",
                "<think>Cell 4 is behind the tool.</think>I will look.",
                "Cell 4 is behind the tool.\n</think>\n\nI will look.",
                "Cell 4 is behind the tool.\nI will look.",
            )
        ],
        (changed(content=None), Tolerance.DROPPED_TEXT),
        (changed(content=""), Tolerance.DROPPED_TEXT),
    ],
)
def test_each_tolerance_keeps_the_turn_and_is_named(forest: Forest, sent: Any, tolerance: Tolerance) -> None:
    found = match(forest, SYSTEM, USER, sent, RESULT)
    assert found.continues
    assert found.turn == 0
    assert found.tolerances == {tolerance}
    assert found.messages[2] == REPLY


LISTED = (
    "[{'id': 'call00000', 'type': 'function', 'function': {'name': 'look', 'arguments': {'cell': 4, 'deep': True}}}]"
)


def listed(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


@pytest.mark.parametrize(
    ("text", "is_ours"),
    [
        (f"I will look.\nCalling tools:\n{LISTED}", True),
        (f"I will look.\nCalls:\n{json.dumps(DELIVERED['tool_calls'])}", True),
        (f"I will look.\n{LISTED}", False),
        (f"I will look.\nI did not:\nCalling tools:\n{LISTED}", False),
        (f"I will look!\nCalling tools:\n{LISTED}", False),
        (f"I will look.\nCalling tools:\n{LISTED.replace('True', 'False')}", False),
        (f"I will look.\nCalling tools:\n{LISTED.replace('call00000', 'call00001')}", False),
        (f"I will look.\nCalling tools:\n[{LISTED[1:-1]}, {LISTED[1:-1]}]", False),
        (f"I will look.\nCalling tools:\n{LISTED} and more", False),
        ("I will look.\nCalling tools:\n[]", False),
        (f"I will look.\nCalling tools:\n{'[' * 100_000}", False),
        ("I will look.\nCalling tools:\n[{'function': 3}]", False),
    ],
)
def test_calls_that_came_back_as_a_list_in_the_text_are_ours_only_if_it_says_nothing_else(
    forest: Forest, text: str, is_ours: bool
) -> None:
    found = match(forest, SYSTEM, USER, listed(text), {"role": "user", "content": "Observation:\n17"})
    assert found.continues is is_ours
    if is_ours:
        expected = {Tolerance.FOLDED_CALLS, Tolerance.DROPPED_REASONING, Tolerance.CONTENT_FORM}
        assert (found.messages[2], found.tolerances) == (REPLY, expected)


@pytest.mark.parametrize("code", ["print(add(2, 3))", "print(add(2, 4))"])
@pytest.mark.parametrize("end", ["", "</code>"])
def test_code_that_came_back_as_a_call_is_ours_if_the_reply_has_it(code: str, end: str) -> None:
    """The delivered text ends before the stop string, which the agent puts back."""
    said = {"role": "assistant", "content": "I add.\n<code>\nprint(add(2, 3))\n</code>"}
    forest = Forest()
    delivered = {**said, "content": said["content"].removesuffix("</code>")}
    record(forest, [SYSTEM, USER], said, delivered, turn=0)
    call = {"id": "call_1", "type": "function", "function": {"name": "python_interpreter", "arguments": code}}
    text = f"{delivered['content']}{end}\nCalling tools:\n{[call]}"
    found = match(forest, SYSTEM, USER, listed(text), {"role": "user", "content": "Observation:\n5"})
    assert found.continues is (code == "print(add(2, 3))")


LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"cell": {"type": "integer"}, "far": {"default": False}}},
    },
}


@pytest.mark.parametrize(
    ("added", "is_same"),
    [('"far": false', True), ('"far": 0', False), ('"far": true', False), ('"near": false', False)],
)
def test_a_default_of_the_tools_schema_may_be_added_to_a_call(added: str, is_same: bool) -> None:
    forest = Forest()
    forest.learn_tools("t", [LOOK])
    record(
        forest, [USER], {**DELIVERED, "tool_calls": call(function={"name": "look", "arguments": '{"cell": 4}'})}, turn=0
    )
    sent = changed(tool_calls=call(function={"name": "look", "arguments": f'{{{added}, "cell": 4}}'}))
    found = match(forest, USER, sent, RESULT)
    assert found.continues == is_same
    assert found.tolerances == ({Tolerance.ARGUMENT_DEFAULTS} if is_same else frozenset())


def test_given_replies_that_differ_in_a_default_are_two_messages() -> None:
    forest = Forest()
    forest.learn_tools("t", [LOOK])
    given = [
        changed(tool_calls=call(function={"name": "look", "arguments": text}))
        for text in ('{"cell": 4}', '{"cell": 4, "far": false}')
    ]
    user = forest.add_given(USER, parent=None)
    assert forest.add_given(given[0], parent=user) != forest.add_given(given[1], parent=user)


@pytest.mark.parametrize("content", [None, "", []])
def test_no_content_has_several_forms(content: Any) -> None:
    forest = Forest()
    reply = {**DELIVERED, "content": None}
    record(forest, [USER], reply, turn=0)
    found = match(forest, USER, {**reply, "content": content}, RESULT)
    assert found.continues


def test_replaced_call_ids_are_mapped_to_the_recorded_ones(forest: Forest) -> None:
    sent = changed(tool_calls=call(id="toolu_01"))
    found = match(forest, SYSTEM, USER, sent, {**RESULT, "tool_call_id": "toolu_01"})
    assert found.tolerances == {Tolerance.CALL_IDS}
    assert found.messages[3]["tool_call_id"] == "call00000"


def test_a_result_without_an_id_answers_the_next_call() -> None:
    forest = Forest()
    calls = [{**DELIVERED["tool_calls"][0], "id": f"c{k}"} for k in range(2)]
    record(forest, [USER], {**REPLY, "tool_calls": calls}, turn=0)
    sent = {**REPLY, "tool_calls": [{k: v for k, v in one.items() if k != "id"} for one in calls]}
    found = match(forest, USER, sent, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"})
    assert [message.get("tool_call_id") for message in found.messages[2:]] == ["c0", "c1"]


@pytest.mark.parametrize(
    "sent",
    [
        changed(content="I will look!"),
        changed(reasoning_content="Cell 4 is somewhere else."),
        changed(reasoning_content=None, content="<think>Cell 4 is elsewhere.</think>I will look."),
        changed(reasoning_content=None, content="<think>Cell 4 is behind the tool.</think>I looked."),
        changed(content="<think>Cell 4 is behind the tool.</think>I will look."),
        changed(content=None, tool_calls=[]),
        changed(content=[{"type": "image", "image": "x"}]),
        changed(tool_calls=[]),
        changed(tool_calls=call() + call(id="b")),
        changed(tool_calls=call(function={"name": "look", "arguments": '{"cell": 5, "deep": true}'})),
        changed(tool_calls=call(function={"name": "look", "arguments": '{"cell": 4, "deep": 1}'})),
        changed(tool_calls=call(function={"name": "find", "arguments": '{"cell": 4, "deep": true}'})),
        changed(name="helper"),
    ],
)
def test_a_changed_word_or_call_is_not_our_turn(forest: Forest, sent: Any) -> None:
    found = match(forest, SYSTEM, USER, sent, {"role": "user", "content": "Go on."})
    assert found.fork is ForkReason.EDITED_REPLY
    assert (found.turn, found.num_matched) == (None, 2)


def test_a_text_that_closes_reasoning_is_matched_as_it_is_before_it_is_taken_apart() -> None:
    forest = Forest()
    reply = {"role": "assistant", "content": "b</think>c", "reasoning_content": "a"}
    record(forest, [USER], reply, turn=0)
    record(forest, [USER], {"role": "assistant", "content": "c", "reasoning_content": "b"}, turn=1)
    found = match(forest, USER, {"role": "assistant", "content": "b</think>c"}, USER)
    assert (found.turn, found.tolerances) == (0, {Tolerance.DROPPED_REASONING})


def test_the_beginning_of_a_reply_is_left_out_alone_and_before_the_reply_to_the_retry(forest: Forest) -> None:
    again = {**DELIVERED, "content": "I look now.", "reasoning_content": "Again."}
    record(forest, [SYSTEM, USER], again, turn=1)
    begun = {"role": "assistant", "content": "I wi", "reasoning_content": "Cell 4 is behind the tool."}
    found = match(forest, SYSTEM, USER, begun)
    assert (found.messages, found.fork) == ((SYSTEM, USER), None)
    assert found.tolerances == {Tolerance.DROPPED_TEXT}
    joined = {**again, "content": "I wiI look now.", "reasoning_content": "Cell 4 is behind the tool.Again."}
    found = match(forest, SYSTEM, USER, joined, RESULT)
    assert (found.turn, found.fork, found.tolerances) == (1, None, {Tolerance.DROPPED_TEXT})


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "I won't"}],
        [{"role": "assistant", "content": "will look."}],
        [{"role": "assistant", "content": "I wi", "reasoning_content": "Cell 5"}],
        [{"role": "assistant", "content": ""}],
        [{"role": "assistant", "content": "I wi"}, USER],
        [changed(content="You lI will look."), RESULT],
        [changed(content="I will look. And I wi"), RESULT],
    ],
)
def test_what_is_no_beginning_or_is_answered_is_not_left_out(forest: Forest, messages: list[Any]) -> None:
    found = match(forest, SYSTEM, USER, *messages)
    assert (found.fork, found.num_matched) == (ForkReason.EDITED_REPLY, 2)
    assert len(found.messages) == 2 + len(messages)


def test_the_lost_beginning_of_a_reply_and_the_reply_to_the_retry_may_come_as_one_message() -> None:
    """The gateway was killed while it streamed the first: nothing of it is recorded."""
    forest = Forest()
    begun = {"role": "assistant", "content": "I wi", "reasoning_content": "Hm."}
    record(forest, [SYSTEM, USER, begun], REPLY, DELIVERED, turn=0)
    joined = {**DELIVERED, "content": "I wiI will look.", "reasoning_content": "Hm.Cell 4 is behind the tool."}
    call_ids = [{**DELIVERED["tool_calls"][0], "id": "other"}]
    for sent, answered in ((joined, RESULT), ({**joined, "tool_calls": call_ids}, {**RESULT, "tool_call_id": "other"})):
        found = match(forest, SYSTEM, USER, sent, answered)
        assert (found.turn, found.fork, found.continues) == (0, None, True)
        assert found.tolerances == {Tolerance.CONTENT_FORM}
        assert found.messages == (SYSTEM, USER, begun, REPLY, RESULT)
        assert (found.num_matched, found.node) == (4, 3)
    answer = {"role": "assistant", "content": "It is 17."}
    record(forest, [RESULT], answer, turn=1, after=3)
    found = match(forest, SYSTEM, USER, joined, RESULT, answer, USER)
    assert (found.turn, found.fork, found.num_matched) == (1, None, 6)
    found = match(forest, SYSTEM, USER, {**joined, "content": "I woI will look."}, RESULT)
    assert (found.turn, found.fork, found.num_matched) == (None, ForkReason.FOREIGN_REPLY, 2)
    record(forest, [RESULT], answer, turn=2, after=3)  # the walk before knows of one such answer
    found = match(forest, SYSTEM, USER, joined, RESULT, answer, USER)
    assert found.turn == 2
    assert Tolerance.SEVERAL_MATCHES in found.tolerances


def test_reordered_calls_are_not_our_turn() -> None:
    forest = Forest()
    calls = [{"id": n, "type": "function", "function": {"name": n, "arguments": "{}"}} for n in ("a", "b")]
    record(forest, [USER], {**REPLY, "tool_calls": calls}, turn=0)
    found = match(forest, USER, {**REPLY, "tool_calls": calls[::-1]}, {**RESULT, "tool_call_id": "a"})
    assert found.fork is ForkReason.EDITED_REPLY


def test_an_assistant_message_that_was_never_sampled(forest: Forest) -> None:
    foreign = {"role": "assistant", "content": "Summary of my work."}
    found = match(forest, SYSTEM, USER, DELIVERED, RESULT, foreign, USER)
    assert found.fork is ForkReason.FOREIGN_REPLY
    assert found.turn == 0


def test_a_changed_earlier_message_rewrites_history(forest: Forest) -> None:
    answer = {"role": "assistant", "content": "It is 17."}
    record(forest, [RESULT], answer, turn=1, after=2)
    found = match(forest, SYSTEM, USER, DELIVERED, {**RESULT, "content": "18"}, answer, USER)
    assert found.fork is ForkReason.REWRITTEN_HISTORY
    task = {"role": "user", "content": "A task of its own"}
    record(forest, [task, USER], answer, turn=2)
    assert match(forest, task, {"role": "user", "content": "Else"}).fork is ForkReason.REWRITTEN_HISTORY


def test_i8_a_branch_that_leaves_replies_out_has_a_reason(forest: Forest) -> None:
    record(forest, [RESULT], {"role": "assistant", "content": "It is 17."}, turn=1, after=2)
    hint = {"role": "user", "content": "Try again."}
    first = match(forest, SYSTEM, USER, hint)
    assert (first.turn, first.fork, first.continues) == (None, ForkReason.DROPPED_REPLY, False)
    for left_out in ([hint], [RESULT, hint]):
        found = match(forest, SYSTEM, USER, DELIVERED, *left_out)
        assert (found.turn, found.fork, found.continues) == (0, ForkReason.DROPPED_REPLY, True)


def test_another_system_prompt_or_task_is_another_conversation(forest: Forest) -> None:
    for messages in ([{**SYSTEM, "content": "Summarise."}, USER], [SYSTEM, {**USER, "content": "A task of its own"}]):
        found = match(forest, *messages)
        assert (found.turn, found.fork) == (None, None)


def test_changed_tools_and_options_are_named(forest: Forest) -> None:
    messages = [SYSTEM, USER, DELIVERED, RESULT]
    assert match(forest, *messages, settings=TurnSettings(tools="x", options="o")).fork is ForkReason.CHANGED_TOOLS
    assert match(forest, *messages, settings=TurnSettings(tools="t", options="x")).fork is ForkReason.CHANGED_OPTIONS


def test_the_same_question_again_is_a_sibling(forest: Forest) -> None:
    found = match(forest, SYSTEM, USER)
    assert (found.num_matched, found.turn, found.fork) == (2, None, None)


def test_parallel_answers_to_one_call_continue_one_turn(forest: Forest) -> None:
    record(forest, [RESULT], {"role": "assistant", "content": "It is 17."}, turn=1, after=2)
    found = match(forest, SYSTEM, USER, DELIVERED, {**RESULT, "content": "an error"})
    assert found.continues
    assert found.turn == 0


def test_the_longest_history_wins_then_the_newest_and_it_says_so(forest: Forest) -> None:
    record(forest, [SYSTEM, USER], REPLY, DELIVERED, turn=1)
    record(forest, [SYSTEM, USER], REPLY, DELIVERED, turn=2)
    found = match(forest, SYSTEM, USER, DELIVERED, RESULT)
    assert found.turn == 2
    assert found.tolerances == {Tolerance.SEVERAL_MATCHES}
    node = forest.match([SYSTEM, USER, DELIVERED], SETTINGS).node
    assert node is not None
    record(forest, [RESULT], {"role": "assistant", "content": "17"}, turn=3, after=2)  # after turn 0
    found = match(forest, SYSTEM, USER, DELIVERED, RESULT, {"role": "assistant", "content": "17"}, USER)
    assert found.turn == 3
    assert found.tolerances == frozenset()


def test_of_equal_replies_the_one_with_the_same_tools_is_continued(forest: Forest) -> None:
    forest.add_reply(REPLY, DELIVERED, parent=1, turn=1, settings=TurnSettings(tools="x", options="o"))
    assert match(forest, SYSTEM, USER, DELIVERED, RESULT).turn == 0


def test_given_messages_tolerate_forms_that_mean_the_same() -> None:
    forest = Forest()
    record(forest, [{"role": "user", "content": "Hi"}], {"role": "assistant", "content": "Hello"}, turn=0)
    sent = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
    assert match(forest, sent, {"role": "assistant", "content": "Hello"}, USER).continues
    for other in ("Hi ", "hi"):
        assert not match(
            forest, {"role": "user", "content": other}, {"role": "assistant", "content": "Hello"}
        ).continues


def test_a_given_message_is_recorded_once(forest: Forest) -> None:
    assert forest.add_given(SYSTEM, parent=None) == 0
    assert forest.add_given(USER, parent=0) == 1
    assert forest.num_conversations == 1
