"""Agents of each dialect in a session: what they send back continues the recorded ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

import unbroken.server.http.known_bodies as known_bodies
from support.dialects import (
    GEMINI,
    MESSAGES,
    RESPONSES,
    join_answers,
    join_message,
    join_response,
    read_answers,
    read_events,
)
from support.gateways import error, running_gateway, scripted
from support.servers import encode

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"cell": {"type": "integer"}}}
LOOK = '<tool_call>\n{"name": "look", "arguments": {"cell": 4}}\n</tool_call>'
REPLIES = (
    f"<think>\nhm\n</think>\n\nI look twice.\n{LOOK}\n{LOOK}<|im_end|>",
    f"{LOOK}<|im_end|>",
    "It is 17.<|im_end|>",
)


async def ask(agent: httpx.AsyncClient, path: str, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """Ask under the agent's own name of the model: Claude Code drops the thinking of an answer of another model."""
    body = {"model": "mine", **body}
    if stream:
        join = join_message if path == MESSAGES else join_response
        answered = join(await read_events(agent, path, body))
    else:
        answer = await agent.post(path, json=body)
        assert answer.status_code == 200, answer.text
        answered = answer.json()
    assert answered["model"] == "mine"
    return answered


async def play_messages(agent: httpx.AsyncClient, stream: bool, keep: Callable[[dict[str, Any]], bool]) -> None:
    """As Claude Code 2.1: system blocks, a system message behind the question, cache marks that move, errors."""
    mark = {"cache_control": {"type": "ephemeral"}}
    fields = {
        "max_tokens": 64000,
        "system": [{"type": "text", "text": "x-billing: 1;"}, {"type": "text", "text": "Be brief.", **mark}],
        "tools": [{"name": "look", "description": "Look.", "input_schema": SCHEMA}],
        "metadata": {"user_id": "{}"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    question = {"type": "text", "text": "What is in it?", **mark}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>\nToday.\n"}, question]},
        {"role": "system", "content": "Available agents: none."},
    ]
    for _ in REPLIES:
        message = await ask(agent, MESSAGES, {**fields, "messages": history}, stream=stream)
        calls = [block for block in message["content"] if block["type"] == "tool_use"]
        if not calls:
            return
        for earlier in history:
            if isinstance(earlier["content"], list):
                earlier["content"][-1].pop("cache_control", None)
        results: list[dict[str, Any]] = [
            {"tool_use_id": call["id"], "type": "tool_result", "content": "17", "is_error": k == 1}
            for k, call in enumerate(calls)
        ]
        results[-1] |= mark
        history.append({"role": "assistant", "content": [block for block in message["content"] if keep(block)]})
        history.append({"role": "user", "content": results})
        history.append({"role": "system", "content": "The task tools have not been used."})


async def play_responses(agent: httpx.AsyncClient, stream: bool, keep: Callable[[dict[str, Any]], bool]) -> None:
    """As Codex 0.169: two developer messages, tools in a namespace, items with the ids that they had."""
    look = {"type": "function", "name": "look", "description": "Look.", "strict": False, "parameters": SCHEMA}
    goal = {**look, "name": "goal"}
    fields = {
        "tools": [look, {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [goal]}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"turn": "{}"},
    }
    given = (("developer", "You are an agent."), ("developer", "Skills: none."), ("user", "Today."), ("user", "Look."))
    items: list[dict[str, Any]] = [
        {"type": "message", "id": f"msg_{k}", "role": role, "content": [{"type": "input_text", "text": text}]}
        for k, (role, text) in enumerate(given)
    ]
    for _ in REPLIES:
        response = await ask(agent, RESPONSES, {**fields, "input": items}, stream=stream)
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        if not calls:
            return
        items += [item for item in response["output"] if keep(item)]
        items += [
            {"type": "function_call_output", "id": f"fco_{k}", "call_id": call["call_id"], "output": "17"}
            for k, call in enumerate(calls)
        ]


async def play_gemini(agent: httpx.AsyncClient, stream: bool, keep: Callable[[dict[str, Any]], bool]) -> None:
    """As gemini-cli 0.61: ids with the function's name, no thoughts but their signatures, texts joined."""
    path = GEMINI.replace("tiny", "gemini-pro")
    fields = {
        "systemInstruction": {"parts": [{"text": "You are an agent."}], "role": "user"},
        "tools": [{"functionDeclarations": [{"name": "look", "description": "Look.", "parametersJsonSchema": SCHEMA}]}],
        "generationConfig": {"temperature": 1, "thinkingConfig": {"includeThoughts": keep is keep_all}},
    }
    contents: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": "Today."}, {"text": "What is in it?"}]}]
    for _ in REPLIES:
        body = {**fields, "contents": contents}
        if stream:
            answered = join_answers(await read_answers(agent, body, path=path))
        else:
            answer = await agent.post(path, json=body)
            assert answer.status_code == 200, answer.text
            answered = answer.json()
        assert answered["modelVersion"] == "gemini-pro"
        content = answered["candidates"][0]["content"]
        calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
        if not calls:
            return
        for call in calls:
            call["id"] = f"look__{call['id']}"
        contents.append({**content, "parts": [part for part in content["parts"] if keep(part)]})
        responses = [{"id": call["id"], "name": "look", "response": {"output": "17"}} for call in calls]
        contents.append({"role": "user", "parts": [{"functionResponse": response} for response in responses]})


def keep_all(block: dict[str, Any]) -> bool:
    return True


def drop_reasoning(block: dict[str, Any]) -> bool:
    return block.get("type") not in ("thinking", "reasoning") and not block.get("thought")


@pytest.mark.parametrize("keep", [keep_all, drop_reasoning])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("play", [play_messages, play_responses, play_gemini])
async def test_i1_an_agent_of_each_dialect_is_one_exact_row(
    tmp_path: Path, play: Any, stream: bool, keep: Callable[[dict[str, Any]], bool]
) -> None:
    engine = scripted(*REPLIES)
    async with running_gateway(engine, tmp_path) as gateway:
        created = await gateway.create()
        await play(gateway.agent(created), stream, keep)
        session = await gateway.look(created)
        rows = (await gateway.look(created, "/samples?advantage=1"))["samples"]
    assert (session["num_turns"], session["forks"]) == (3, [])
    assert session["counters"]["bridges/derived"] == 2
    (row,) = rows
    trained = [i for i, used in zip(row["token_ids"], row["loss_mask"], strict=True) if used]
    assert trained == [one for reply in REPLIES for one in encode(reply)]


HUGE = {"cell": 12345678901234567890123, "others": [-(2**63) - 1, 2**64, 1e22]}
"""Integers beyond 64 bits, and a float as large, which is none."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("play", [play_messages, play_gemini])
async def test_i1_integers_beyond_64_bits_in_a_call_come_and_go_as_the_model_wrote_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, play: Any, stream: bool
) -> None:
    """Claude's and Gemini's dialects give arguments as JSON: their client has numbers, not the model's text."""
    seen: list[Any] = []
    call = f'<tool_call>\n{{"name": "look", "arguments": {json.dumps(HUGE)}}}\n</tool_call><|im_end|>'

    def note(block: dict[str, Any]) -> bool:
        seen.append(block.get("input") or block.get("functionCall", {}).get("args"))
        return True

    monkeypatch.setattr(known_bodies, "_MIN_BYTES", 0)
    async with running_gateway(scripted(call, call, REPLIES[2]), tmp_path) as gateway:
        created = await gateway.create(metadata=HUGE)
        await play(gateway.agent(created), stream, note)
        session = await gateway.look(created)
        (row,) = (await gateway.look(created, "/samples?advantage=1"))["samples"]
    assert seen == [HUGE, HUGE]
    assert (session["num_turns"], session["forks"], session["settings"]["metadata"]) == (3, [], HUGE)
    assert "tolerances/argument_spelling" not in session["counters"]
    assert sum(row["loss_mask"]) == sum(len(encode(reply)) for reply in (call, call, REPLIES[2]))


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, GEMINI])
async def test_a_session_in_the_path_refuses_in_the_dialects_form(tmp_path: Path, path: str) -> None:
    async with running_gateway(scripted("ok<|im_end|>"), tmp_path) as gateway:
        created = await gateway.create()
        await gateway.client.post(f"/v1/sessions/{created['session_id']}/finish", json={"status": "completed"})
        bodies: dict[str, dict[str, Any]] = {
            MESSAGES: {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
            RESPONSES: {"input": "x"},
            GEMINI: {"contents": [{"parts": [{"text": "x"}]}]},
        }
        refused = await gateway.client.post(f"/s/{created['api_key']}{path}", json=bodies[path])
    assert refused.status_code == 409
    assert ("type" in refused.json()) == (path == MESSAGES)
    assert ("status" in refused.json()["error"]) == (path == GEMINI)


async def test_a_default_that_an_agent_adds_to_its_calls_is_no_fork_after_a_restart_too(tmp_path: Path) -> None:
    """Claude Code adds `replace_all: false` to an Edit that left it out."""
    engine = scripted(f"{LOOK}<|im_end|>", "It is 17.<|im_end|>")
    far = {"type": "boolean", "default": False}
    body: dict[str, Any] = {
        "max_tokens": 90,
        "tools": [{"name": "look", "input_schema": {**SCHEMA, "properties": {**SCHEMA["properties"], "far": far}}}],
        "messages": [{"role": "user", "content": "What is in it?"}],
    }
    async with running_gateway(engine, tmp_path) as gateway:
        created = await gateway.create()
        message = await ask(gateway.agent(created), MESSAGES, body, stream=False)
    (called,) = message["content"]
    called["input"] = {"far": False, **called["input"]}
    body["messages"] += [
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": called["id"], "content": "17"}]},
    ]
    async with running_gateway(engine, tmp_path) as gateway:
        await ask(gateway.agent(created), MESSAGES, body, stream=False)
        session = await gateway.look(created)
    assert session["forks"] == []
    assert session["counters"]["tolerances/argument_defaults"] == 1


@pytest.mark.parametrize("by", ["previous_response_id", "item_reference", "conversation", "conversation, not kept"])
@pytest.mark.parametrize("is_restarted", [False, True])
async def test_an_agent_that_names_earlier_answers_is_one_exact_row_after_a_restart_too(
    tmp_path: Path, by: str, is_restarted: bool
) -> None:
    """Microsoft's agent-framework names the answer before, AI SDK each item of all answers."""
    fields = {"model": "mine", "instructions": "Be brief.", "tools": [{"type": "function", "name": "look"}]}
    engine = scripted(*REPLIES)
    history: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
    named: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running_gateway(engine, tmp_path))
        created = await gateway.create()
        if by.startswith("conversation"):
            begun = await gateway.agent(created).post("/v1/conversations", json={"items": history})
            named, history = {"conversation": begun.json()["id"]}, []
            named |= {"store": False} if by.endswith("not kept") else {}
        for _ in REPLIES:
            if is_restarted:
                await stack.aclose()
                gateway = await stack.enter_async_context(running_gateway(engine, tmp_path))
            body = {**fields, **named, "input": history}
            response = await ask(gateway.agent(created), RESPONSES, body, stream=False)
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            results = [{"type": "function_call_output", "call_id": one["call_id"], "output": "17"} for one in calls]
            if by == "item_reference":
                history += [{"type": "item_reference", "id": item["id"]} for item in response["output"]]
                history += results
            elif by == "previous_response_id":
                named, history = {"previous_response_id": response["id"]}, results
            else:
                history = results
        session = await gateway.look(created)
        (row,) = (await gateway.look(created, "/samples?advantage=1"))["samples"]
        other = gateway.agent(await gateway.create())
        refused = await other.post(RESPONSES, json={**fields, **named, "input": history})
        assert error(refused) == (400, "previous_response_not_found")
    assert (session["num_turns"], session["forks"]) == (3, [])
    assert [i for i, used in zip(row["token_ids"], row["loss_mask"], strict=True) if used] == [
        one for reply in REPLIES for one in encode(reply)
    ]


@pytest.mark.parametrize("place", ["path", "header", "query"])
async def test_googles_clients_give_the_key_of_a_session_in_the_path_a_header_or_the_query(
    tmp_path: Path, place: str
) -> None:
    body = {"contents": [{"role": "user", "parts": [{"text": "x"}]}]}
    async with running_gateway(scripted("ok<|im_end|>"), tmp_path) as gateway:
        created = await gateway.create()
        key = created["api_key"]
        path = {"path": f"/s/{key}{GEMINI}", "header": GEMINI, "query": f"{GEMINI}?key={key}"}[place]
        headers = {"x-goog-api-key": key} if place == "header" else {"x-goog-api-key": "their-own"}
        answer = await gateway.client.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        wrong = await gateway.client.post(f"{GEMINI}?key=ub-session-none", json=body)
        assert (wrong.status_code, wrong.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
        assert (await gateway.look(created))["num_turns"] == 1
