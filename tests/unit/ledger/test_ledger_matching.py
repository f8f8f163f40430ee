"""What a message is apart from its spelling: each rule takes what it is for, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unbroken.ledger.forest import Forest, TurnSettings, has_one_spelling
from unbroken.ledger.matching import MessageForm, Place, follows_beginning, identify, unfold_reasoning
from unbroken.types import EncodedImage

CALLS = [
    {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}} for name in ("first", "second")
]


def form(content: Any, *, role: str = "assistant", **fields: Any) -> MessageForm:
    message: Any = {"role": role, "content": content, **fields}
    return identify(message, Place())[0]


def calling(arguments: Any) -> MessageForm:
    return form("", tool_calls=[{"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}}])


@pytest.mark.parametrize(
    ("sent", "reasoning", "follows"),
    [
        ("I wiI look now.", "", True),
        ("I wiI look now.", "Hm.Again.", True),
        ("I look now.", "", False),  # nothing was streamed before it
        ("I wi", "", False),  # the beginning of a streamed reply alone
        ("I wiI look now.", "Hm.", False),  # the beginning of its reasoning alone
        ("You lI look now.", "", False),
    ],
)
def test_a_message_follows_a_beginning_if_both_parts_are_there(sent, reasoning, follows):
    delivered = form("I look now.", reasoning_content="Again.")
    streamed = [form("I will look.", reasoning_content="Hm. Cell 4.")]
    assert follows_beginning(form(sent, reasoning_content=reasoning), delivered, streamed) is follows


def test_reasoning_is_unfolded_from_an_assistants_text_that_closes_it_and_from_nothing_else():
    folded: Any = {"role": "assistant", "content": "<think>Hm.</think>\nIt is 17.", "name": "a"}
    unfolded = {"role": "assistant", "content": "It is 17.", "name": "a", "reasoning_content": "Hm."}
    assert unfold_reasoning(folded) == unfolded
    for other in ({**folded, "content": "It is 17."}, {**folded, "role": "user"}, {**folded, "content": None}):
        assert unfold_reasoning(other) is other


@pytest.mark.parametrize(
    ("call_id", "answers"),
    [("first", (1, 0)), ("second", (1, 1)), (None, (1, 0)), ("unknown", None)],
)
def test_a_result_answers_the_call_that_it_names_and_without_a_name_the_next(call_id, answers):
    made: Any = {"role": "assistant", "content": "", "tool_calls": CALLS}
    _, place = identify(made, Place())
    result: Any = {"role": "tool", "content": "17", "tool_call_id": call_id}
    assert identify(result, place)[0].answers == answers


def test_images_are_what_their_bytes_are_and_other_parts_are_not_images():
    image = EncodedImage(b"a picture")
    part = form([{"type": "image", "image": image}], role="user")
    assert form([{"type": "image_url", "image_url": {"url": image}}], role="user").key == part.key
    assert form([{"type": "image", "image": EncodedImage(b"another")}], role="user").key != part.key
    files = [form([{"type": "file", "file": {"name": name}}], role="user") for name in "aab"]
    assert files[0].key == files[1].key != files[2].key
    assert files[0].text is None


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ('{"cells": [1.0, 2]}', '{"cells": [1, 2.0]}', True),
        ("[1]", "[1.0]", True),  # not an object, as small models write
        ("[1]", "[2]", False),
        ('{"cells": [1]}', '{"cells": [true]}', False),
        ("{not json", "{not json", True),
        ("{not json", "{nor this", False),
    ],
)
def test_arguments_are_equal_if_their_values_are(one, other, is_same):
    assert (calling(one).key == calling(other).key) is is_same


@pytest.mark.parametrize(
    ("fields", "has_one"),
    [
        ({}, True),
        ({"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}, True),
        ({"content": [{"type": "text", "text": "a", "index": 1}]}, False),
        ({"extra": {"deep": {"number": True}}}, False),
        ({"tool_calls": CALLS}, True),
        ({"tool_calls": [{**CALLS[0], "function": {"name": "look", "arguments": {"cell": "4"}}}]}, False),
    ],
)
def test_a_message_has_one_spelling_unless_it_has_a_number_or_an_object_of_arguments(fields, has_one):
    assert has_one_spelling({"role": "assistant", "content": "a", **fields}) is has_one


def test_only_an_assistants_message_is_the_beginning_of_a_reply():
    settings = TurnSettings(tools="t", options="o")
    user: Any = {"role": "user", "content": "Go on."}
    reply: Any = {"role": "assistant", "content": "I will look."}
    forest = Forest()
    forest.add_reply(reply, reply, parent=forest.add_given(user, parent=None), turn=0, settings=settings)
    for role, num_messages in (("assistant", 1), ("user", 2)):
        sent = json.loads(json.dumps([user, {"role": role, "content": "I wi"}]))
        assert len(forest.match(sent, settings).messages) == num_messages
