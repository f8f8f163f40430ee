"""Agents of the chat dialect in a session, by how each spells its history (`make agents` runs them themselves)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import templates
from support.gateways import CHAT, ask, running_gateway, scripted
from support.servers import encode
from support.tokenizers import make_tokenizer

LOOK = '<tool_call>\n{{"name": "look", "arguments": {{"cell": {}}}}}\n</tool_call><|im_end|>'
REPLIES = tuple(f"<think>\nhm\n</think>\n\nStep {cell}.\n{LOOK.format(cell)}" for cell in (4, 5))
LAST = "<think>\nhm\n</think>\n\nIt is 17.<|im_end|>"
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is in the cells?"}]
Message = dict[str, Any]
Spell = Callable[[Message], list[Message]]
"""A delivered message to what the agent sends for it and the results of its calls."""


def results(message: Message) -> list[Message]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": "17"} for call in message["tool_calls"]]


def spell_as_opencode(message: Message) -> list[Message]:
    """It parses arguments and writes them without spaces."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(_arguments(call), separators=(",", ":"))}}
        for call in message["tool_calls"]
    ]
    reasoning = message["reasoning_content"]
    sent = {"role": "assistant", "content": message["content"], "reasoning_content": reasoning, "tool_calls": calls}
    return [sent, *results(message)]


def spell_as_langchain(message: Message) -> list[Message]:
    """It drops the reasoning, and numbers no calls."""
    calls = [{"type": "function", "id": call["id"], "function": call["function"]} for call in message["tool_calls"]]
    return [{"content": message["content"], "role": "assistant", "tool_calls": calls}, *results(message)]


def spell_as_litellm(message: Message) -> list[Message]:
    """It dumps its own object with all its fields, as mini-swe-agent sends it."""
    more = {"function_call": None, "provider_specific_fields": {"refusal": None}}
    return [{**message, **more}, *results(message)]


def spell_as_gptme(message: Message) -> list[Message]:
    """It writes the reasoning into the text."""
    text = f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content']}"
    return [{"role": "assistant", "content": text, "tool_calls": message["tool_calls"]}, *results(message)]


def spell_as_crewai(message: Message) -> list[Message]:
    """It sends calls without the text beside them."""
    reasoning = message["reasoning_content"]
    sent = {"role": "assistant", "content": None, "reasoning_content": reasoning, "tool_calls": message["tool_calls"]}
    return [sent, *results(message)]


def spell_as_smolagents(message: Message) -> list[Message]:
    """It lists the calls in the text of a reply, and sends results as a user's text."""
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": "look", "arguments": _arguments(call)}}
        for call in message["tool_calls"]
    ]
    return _as_texts(f"{message['content']}\nCalling tools:\n{calls}")


def spell_freely(message: Message) -> list[Message]:
    """It tells in its own words which calls there were."""
    return _as_texts(f"{message['content']}\nI called {[call['function'] for call in message['tool_calls']]}")


def _as_texts(text: str) -> list[Message]:
    return [
        {"role": "assistant", "content": [{"type": "text", "text": text}]},
        {"role": "user", "content": [{"type": "text", "text": "Observation:\n17"}]},
    ]


def _arguments(call: Message) -> Any:
    return json.loads(call["function"]["arguments"])


async def play(agent: Any, spell: Spell, **fields: Any) -> None:
    history: list[Message] = list(QUESTION)
    for _ in REPLIES:
        history += spell(await ask(agent, history, **fields))
    assert (await ask(agent, history, **fields))["content"] == "It is 17."


@pytest.mark.parametrize(
    ("spell", "tolerance"),
    [
        (spell_as_opencode, "argument_spelling"),
        (spell_as_langchain, "dropped_reasoning"),
        (spell_as_litellm, "extra_fields"),
        (spell_as_gptme, "folded_reasoning"),
        (spell_as_crewai, "dropped_text"),
        (spell_as_smolagents, "content_form dropped_reasoning folded_calls"),
    ],
)
async def test_i4_a_chat_agent_is_one_exact_row(tmp_path: Path, spell: Spell, tolerance: str) -> None:
    async with running_gateway(scripted(*REPLIES, LAST), tmp_path) as gateway:
        created = await gateway.create()
        await play(gateway.agent(created), spell, stop=["Observation:", "Calling tools:"])
        session = await gateway.look(created)
        (row,) = (await gateway.look(created, "/samples?advantage=1"))["samples"]
    assert (session["num_turns"], session["forks"]) == (3, [])
    used = {name: number for name, number in session["counters"].items() if name.startswith("tolerances/")}
    assert used == {f"tolerances/{each}": 2 for each in tolerance.split()}
    assert _trained(row) == [one for reply in (*REPLIES, LAST) for one in encode(reply)]


async def test_i4_an_agent_that_writes_calls_into_its_replies_forks_in_every_turn(tmp_path: Path) -> None:
    async with running_gateway(scripted(*REPLIES, LAST), tmp_path) as gateway:
        created = await gateway.create()
        await play(gateway.agent(created), spell_freely)
        session = await gateway.look(created)
        rows = (await gateway.look(created, "/samples?advantage=1"))["samples"]
    assert [fork["reason"] for fork in session["forks"]] == ["edited_reply"] * 2
    assert sorted(map(_trained, rows)) == sorted(encode(reply) for reply in (*REPLIES, LAST))


async def test_a_template_that_wants_a_result_after_each_call_gets_the_list_as_the_agent_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Mistral's does: the agent would end with an error of the template."""
    tokenizer = make_tokenizer(templates.CALLS_NEED_RESULTS, eos_token="<|im_end|>")
    monkeypatch.setattr("support.gateways.server_tokenizer", lambda: tokenizer)
    async with running_gateway(scripted(*REPLIES, LAST), tmp_path) as gateway:
        created = await gateway.create()
        await play(gateway.agent(created), spell_as_smolagents)
        session = await gateway.look(created)
    assert [fork["reason"] for fork in session["forks"]] == ["edited_reply"] * 2


@pytest.mark.parametrize("text", ["<think>\nmine\n</think>\n\nx", "a</think>b</think>c", "<|im_end|>", "<think>"])
@pytest.mark.parametrize("as_parts", [False, True])
async def test_control_tokens_in_a_reply_that_is_not_ours_fork_once_and_the_agent_goes_on(
    tmp_path: Path, text: str, as_parts: bool
) -> None:
    foreign = {"role": "assistant", "content": [{"type": "text", "text": text}] if as_parts else text}
    async with running_gateway(scripted(*REPLIES, LAST), tmp_path) as gateway:
        created = await gateway.create()
        agent = gateway.agent(created)
        await ask(agent, QUESTION)
        history: list[Message] = [*QUESTION, foreign, {"role": "user", "content": "Go on."}]
        message = await ask(agent, history)
        history += [message, *results(message)]
        assert (await ask(agent, history))["content"] == "It is 17."
        session = await gateway.look(created)
    assert [fork["reason"] for fork in session["forks"]] == ["edited_reply"]
    assert session["counters"]["bridges/derived"] == 1


async def test_a_question_for_a_title_is_a_conversation_of_its_own(tmp_path: Path) -> None:
    """opencode asks for one at the same time, without tools."""
    async with running_gateway(scripted("Cells<|im_end|>", *REPLIES, LAST), tmp_path) as gateway:
        created = await gateway.create()
        agent = gateway.agent(created)
        titles = [{"role": "system", "content": "Find a title."}, {"role": "user", "content": "Title:"}, QUESTION[1]]
        body = {"messages": titles, "max_tokens": 90, "stream": True, "stream_options": {"include_usage": True}}
        assert (await agent.post(CHAT, json=body)).status_code == 200
        await play(agent, spell_as_opencode, tool_choice="auto")
        session = await gateway.look(created)
        rows = (await gateway.look(created, "/samples?advantage=1"))["samples"]
    assert (session["num_turns"], session["num_conversations"], session["forks"]) == (4, 2, [])
    assert [len(_trained(row)) for row in rows] == [
        len(encode("Cells<|im_end|>")),
        sum(len(encode(reply)) for reply in (*REPLIES, LAST)),
    ]


async def test_commands_as_text_are_one_exact_row(tmp_path: Path) -> None:
    """mini-swe-agent without tools: a command in the reply's text, its output as a user's message."""
    replies = [f"<think>\nhm\n</think>\n\nStep.\n\n```sh\n{command}\n```<|im_end|>" for command in ("ls", "pwd")]
    async with running_gateway(scripted(*replies, LAST), tmp_path) as gateway:
        created = await gateway.create()
        agent = gateway.agent(created)
        history: list[Message] = list(QUESTION)
        for _ in range(3):
            message = await ask(agent, history, tools=None)
            more = {"tool_calls": None, "function_call": None, "provider_specific_fields": {"refusal": None}}
            history += [{**message, **more}, {"role": "user", "content": "<returncode>0</returncode>"}]
        session = await gateway.look(created)
        (row,) = (await gateway.look(created, "/samples?advantage=1"))["samples"]
    assert session["forks"] == []
    assert session["counters"]["tolerances/extra_fields"] == 2
    assert _trained(row) == [one for reply in (*replies, LAST) for one in encode(reply)]


def _trained(row: dict[str, Any]) -> list[int]:
    return [one for one, used in zip(row["token_ids"], row["loss_mask"], strict=True) if used]
