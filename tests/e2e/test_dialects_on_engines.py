"""The three dialects of conversations on real engines: the same ids, the same reply, whole and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from support.dialects import MESSAGES, RESPONSES, join_message, join_response, read_events, without_ids
from support.served import save_tiny_model, served
from support.servers import joined_stream

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
USER = {"role": "user", "content": "Pick a city."}
GREEDY = {"model": "tiny", "temperature": 0.0}
IN_CHAT: dict[str, Any] = {
    **GREEDY,
    "messages": [{"role": "system", "content": "Be brief."}, USER],
    "tools": [{"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}],
    "max_completion_tokens": 60,
}
IN_MESSAGES: dict[str, Any] = {
    **GREEDY,
    "system": "Be brief.",
    "messages": [USER],
    "tools": [{"name": "pick", "input_schema": SCHEMA}],
    "max_tokens": 60,
}
IN_RESPONSES: dict[str, Any] = {
    **GREEDY,
    "instructions": "Be brief.",
    "input": [USER],
    "tools": [{"type": "function", "name": "pick", "parameters": SCHEMA, "strict": True}],
    "max_output_tokens": 60,
}


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


async def check_dialects(client: httpx.AsyncClient, *, requires: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ask in three dialects, whole and streamed; returns the message and the response. `requires` exactly one call."""
    in_messages, in_responses, in_chat = IN_MESSAGES, IN_RESPONSES, IN_CHAT
    if requires:
        options = {"chat_template_kwargs": {"enable_thinking": False}}
        once = {"type": "any", "disable_parallel_tool_use": True}
        in_messages = {**in_messages, **options, "tool_choice": once}
        choice = {**options, "tool_choice": "required", "parallel_tool_calls": False}
        in_responses, in_chat = {**in_responses, **choice}, {**in_chat, **choice}
    chat = await post(client, CHAT, in_chat)
    message = await post(client, MESSAGES, in_messages)
    response = await post(client, RESPONSES, in_responses)
    assert without_ids(join_message(await read_events(client, MESSAGES, in_messages))) == without_ids(message)
    assert without_ids(join_response(await read_events(client, RESPONSES, in_responses))) == without_ids(response)

    streamed = await joined_stream(client, CHAT, in_chat)
    parts = [part for item in response["output"] for part in item.get("content", ())]
    assert (
        streamed["content"]
        == (chat["choices"][0]["message"]["content"] or "")
        == "".join(block.get("text", "") for block in message["content"])
        == "".join(part["text"] for part in parts if part["type"] == "output_text")
    )
    counts = [(chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"])]
    counts += [(one["usage"]["input_tokens"], one["usage"]["output_tokens"]) for one in (message, response)]
    assert len(set(counts)) == 1
    return message, response


async def test_the_dialects_agree_on_the_embedded_engine(tmp_path: Path) -> None:
    with served(save_tiny_model(tmp_path), engine="transformers") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            message, response = await check_dialects(client)
    assert message["stop_reason"] in ("max_tokens", "end_turn")
    assert response["status"] in ("incomplete", "completed")


async def test_the_dialects_agree_on_vllm_with_required_calls_too(tmp_path: Path) -> None:
    with served(save_tiny_model(tmp_path)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
            await check_dialects(client)
            message, response = await check_dialects(client, requires=True)
    assert [(block["type"], block.get("name")) for block in message["content"]] == [("tool_use", "pick")]
    assert [(item["type"], item.get("name")) for item in response["output"]] == [("function_call", "pick")]
    assert message["content"][0]["input"]["city"] in ("Paris", "Rome")
