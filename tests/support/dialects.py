"""Anthropic's Messages and OpenAI's Responses for tests: streams joined as their SDKs join them."""

from __future__ import annotations

import json
from typing import Any

import httpx

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"


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
    """The message that the events of Anthropic's dialect tell."""
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
    """An answer without what differs from one answer to the next: ids and times."""
    if isinstance(value, dict):
        hidden = ("id", "call_id", "item_id", "created_at", "completed_at")
        return {key: without_ids(one) for key, one in value.items() if key not in hidden}
    return [without_ids(one) for one in value] if isinstance(value, list) else value
