"""Anthropic's Messages, OpenAI's Responses and Gemini's for tests: streams joined as their SDKs join them."""

from __future__ import annotations

import json
from typing import Any

import httpx

from support.servers import MODEL

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
GEMINI = f"/v1beta/models/{MODEL}:generateContent"


async def read_events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer, each of which is named by its type."""
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for entry in answer.text.strip().split("\n\n"):
        name, data = entry.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def join_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the events of Anthropic's dialect to their message."""
    message: dict[str, Any] = {}
    arguments = ""
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                match delta["type"]:
                    case "input_json_delta":
                        arguments += delta["partial_json"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case kind:
                        key = kind.removesuffix("_delta")
                        assert delta[key]
                        block[key] += delta[key]
            case "content_block_stop":
                assert event["index"] == len(message["content"]) - 1
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(arguments)
            case "message_delta":
                extras = {key: value for key, value in event.items() if key not in ("type", "delta", "usage")}
                message |= event["delta"] | {"usage": event["usage"]} | extras
            case kind:
                assert kind == "message_stop", event
    assert events[-1]["type"] == "message_stop"
    return message


def without_ids(value: Any) -> Any:
    """An answer without its ids and times, which differ from one answer to the next."""
    if isinstance(value, dict):
        hidden = ("id", "call_id", "item_id", "responseId", "created_at", "completed_at")
        return {key: without_ids(one) for key, one in value.items() if key not in hidden}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


def join_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the events of OpenAI's Responses: the response, with its output joined from their deltas."""
    response: dict[str, Any] = {}
    output: list[dict[str, Any]] = []
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        item = output[-1] if output else {}
        kind = event["type"].removeprefix("response.")
        if "item_id" in event:
            assert (event["output_index"], event["item_id"]) == (len(output) - 1, item["id"])
        match kind:
            case "created" | "in_progress":
                assert event["response"]["status"] == "in_progress"
            case "output_item.added":
                assert event["output_index"] == len(output)
                output.append(event["item"])
            case "content_part.added":
                item["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                assert event["delta"]
                item["content"][-1]["text"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == item["content"][-1]["text"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert event["arguments"] == item["arguments"]
            case "custom_tool_call_input.delta":
                item["input"] += event["delta"]
            case "custom_tool_call_input.done":
                assert event["input"] == item["input"]
            case "content_part.done":
                assert event["part"] == item["content"][-1]
            case "output_item.done":
                final = {"status": event["item"]["status"]}
                if item["type"] == "reasoning":
                    final["encrypted_content"] = event["item"]["encrypted_content"]
                item |= final
                assert event["item"] == item
            case _:
                assert kind in ("completed", "incomplete"), event
                response = event["response"]
    assert response["output"] == output
    return response


async def read_answers(client: httpx.AsyncClient, body: dict[str, Any], *, path: str = GEMINI) -> list[dict[str, Any]]:
    """The events of a streamed answer of Gemini's, which have no names, and no mark at their end."""
    answer = await client.post(f"{path.replace(':generate', ':streamGenerate')}?alt=sse", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(entry.removeprefix("data: ")) for entry in answer.text.strip().split("\n\n")]


def join_answers(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the events of Gemini's dialect: parts one after the other, and all else from the last one."""
    parts: list[dict[str, Any]] = []
    for event in events:
        (candidate,) = event["candidates"]
        assert ("finishReason" in candidate) == (event is events[-1])
        for part in candidate["content"]["parts"]:
            before = parts[-1] if parts else {}
            if part == {"text": ""}:
                assert event is events[-1], "an event that has nothing new"
            elif "text" in before and part.keys() == before.keys() - {"thoughtSignature"}:
                before["text"] += part["text"]
            else:
                parts.append(part)
    last = events[-1]
    last["candidates"][0]["content"]["parts"] = parts or [{"text": ""}]
    return last
