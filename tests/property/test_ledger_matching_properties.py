"""Whatever an agent sends, it is matched from where it differs as it would be matched from scratch."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from unbroken.ledger.forest import Forest, Match, TurnSettings, Walk
from unbroken.ledger.matching import digest_json

EXAMPLES = settings(max_examples=num_cases(120, in_fuzz=3000), derandomize=True)
TEXTS = ["a", " a", "", None]
VALUES: list[Any] = [1, 1.0, True, "1"]
"""The first three are equal in Python; in JSON two are."""


class Recorded:
    """A forest, and how to make the same one again."""

    def __init__(self) -> None:
        self.forest = Forest()
        self._steps: list[Callable[[Forest], Any]] = []
        self._num_turns = 0

    def do(self, step: Callable[[Forest], Any]) -> Any:
        self._steps.append(step)
        return step(self.forest)

    def match(self, messages: list[Any], used: TurnSettings, known: Walk | None = None) -> Match:
        again = Forest()
        for step in self._steps:
            step(again)
        expected = again.match(copy.deepcopy(messages), used)
        found = self.forest.match(copy.deepcopy(messages), used, known=known)
        assert found == expected
        assert repr(found.messages) == repr(expected.messages)  # 1, 1.0 and True are equal
        return found

    def answer(self, found: Match, reply: Any, used: TurnSettings) -> None:
        node, turn = found.node, self._num_turns
        for message in found.messages[found.num_matched :]:
            node = self.do(lambda forest, message=message, node=node: forest.add_given(message, parent=node))
        self.do(lambda forest: forest.add_reply(reply, reply, parent=node, turn=turn, settings=used))
        self._num_turns += 1


def make_call(rng: random.Random) -> dict[str, Any]:
    arguments: Any = {name: rng.choice(VALUES) for name in rng.sample(["x", "y"], rng.randint(0, 2))}
    if rng.random() < 0.7:
        arguments = json.dumps(arguments)
    return {"id": rng.choice(["c0", "c1"]), "type": "function", "function": {"name": "f", "arguments": arguments}}


def make_given(rng: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": rng.choice(["system", "user", "tool"]), "content": rng.choice(TEXTS)}
    if message["role"] == "tool" and rng.random() < 0.7:
        message["tool_call_id"] = rng.choice(["c0", "c1"])
    if rng.random() < 0.3:
        message[rng.choice(["score", "index"])] = rng.choice(VALUES)
    return message


def make_reply(rng: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": rng.choice(TEXTS)}
    if rng.random() < 0.5:
        message["tool_calls"] = [make_call(rng) for _ in range(rng.randint(0, 2))]
    if rng.random() < 0.3:
        message["reasoning_content"] = rng.choice(TEXTS)
    return message


def respell(rng: random.Random, message: dict[str, Any]) -> dict[str, Any]:
    """A message that is equal to it, almost, or not at all."""
    if calls := message.get("tool_calls"):
        call, others = calls[0], calls[1:]
        arguments = call["function"]["arguments"]
        if isinstance(arguments, dict):
            items = [(name, rng.choice([value, *VALUES])) for name, value in arguments.items()]
            arguments = dict(items[::-1] if rng.random() < 0.5 else items)
        elif rng.random() < 0.5:
            arguments = arguments.replace(" ", "")
        used = {**call, "id": rng.choice([call["id"], "c2"]), "function": {"name": "f", "arguments": arguments}}
        return {**message, "tool_calls": [used, *others]}
    kept = {name: rng.choice(VALUES) if name in ("score", "index") else value for name, value in message.items()}
    return kept if rng.random() < 0.5 else {**kept, "content": rng.choice(TEXTS)}


def change(rng: random.Random, messages: list[Any]) -> list[Any]:
    """The messages as an agent may send them next."""
    found = list(messages)
    for _ in range(rng.randint(0, 2)):
        place = rng.randint(0, len(found))
        match rng.choice(["respell", "respell", "cut", "drop", "insert", "swap", "append"]):
            case "respell" if place < len(found):
                found[place] = respell(rng, found[place])
            case "cut":
                found = found[:place]
            case "drop":
                del found[place : place + 1]
            case "insert":
                found.insert(place, make_reply(rng) if rng.random() < 0.5 else make_given(rng))
            case "swap" if place + 1 < len(found):
                found[place], found[place + 1] = found[place + 1], found[place]
            case _:
                found += [make_given(rng) for _ in range(rng.randint(1, 2))]
    return found or [make_given(rng)]


def make_tools(rng: random.Random) -> list[Any]:
    properties = {name: {"default": rng.choice(VALUES)} for name in ("x", "y") if rng.random() < 0.4}
    return [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]


@given(st.integers(0, 2**32))
@EXAMPLES
def test_a_request_is_matched_as_from_scratch_whatever_came_before(seed: int) -> None:
    rng = random.Random(seed)
    recorded, sent, tools = Recorded(), [[make_given(rng)]], make_tools(rng)
    for _ in range(rng.randint(2, 12)):
        messages = change(rng, rng.choice([sent[-1], rng.choice(sent)]))
        tools = tools if rng.random() < 0.8 else make_tools(rng)
        used = TurnSettings(tools=digest_json(tools), options=rng.choice(["o", "o", "p"]))
        known = recorded.forest.recall(messages)
        assert repr(known.messages) == repr(tuple(messages[: len(known.messages)]))
        recorded.do(lambda forest, tools=tools, used=used: forest.learn_tools(used.tools, tools))
        found = recorded.match(messages, used, known)
        assert len(recorded.forest.recall(messages).messages) == len(messages)
        sent.append(messages)
        reply = make_reply(rng)
        for _ in range(rng.randint(0, 2)):
            recorded.answer(found, reply, used)
            sent.append([*messages, respell(rng, reply) if rng.random() < 0.3 else reply])
            if rng.random() < 0.3:
                found = recorded.match(messages, used)
            if rng.random() < 0.5:
                reply = respell(rng, reply)
