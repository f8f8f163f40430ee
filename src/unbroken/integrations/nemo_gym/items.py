"""Messages as items of OpenAI's Responses, and back: the form in which NeMo Gym keeps examples and verifies replies.

{"role": "developer", "content": [{"type": "input_text", "text": "Add."}]}  ->  {"role": "system", "content": "Add."}

assistant: reasoning, content, calls  ->  reasoning, message, function_call, ...
tool                                  ->  function_call_output
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from unbroken.errors import InvalidInputError
from unbroken.messages import ContentPart, Message, ToolSchema, get_reasoning, get_text

Item = dict[str, Any]
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def read_messages(params: Mapping[str, Any], place: str) -> list[Message]:
    """The first messages of an example: its instructions and its input.

    Developer messages become system messages, and system messages at the beginning become one, as most templates write
    neither developer messages nor a second system message.

    Raises:
        InvalidInputError: an item or a part is of a type that a conversation here does not have.
    """
    given = params["input"]
    if not isinstance(given, (str, list)):
        raise InvalidInputError(f"{place}, input must be a text or a list, got {_shorten(given)}")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    if params.get("instructions"):
        items.insert(0, {"role": "system", "content": params["instructions"]})
    messages: list[Message] = []
    for k, item in enumerate(items):
        _add_item(messages, item, f"{place}, input[{k}]")
    return messages


def read_tools(params: Mapping[str, Any], place: str) -> list[ToolSchema]:
    """The functions that the model may call; raises `InvalidInputError` for a tool that is not a function."""
    given = params.get("tools") or []
    if not isinstance(given, list):
        raise InvalidInputError(f"{place}, tools must be a list, got {_shorten(given)}")
    tools: list[ToolSchema] = []
    for k, tool in enumerate(given):
        if not isinstance(tool, Mapping) or tool.get("type") != "function" or not tool.get("name"):
            raise InvalidInputError(f"{place}, tools[{k}] must be a function with a name, got {_shorten(tool)}")
        parameters = tool.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise InvalidInputError(f"{place}, tools[{k}].parameters must be an object, got {_shorten(parameters)}")
        schema = {"type": "object", "properties": {}, **parameters}
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
        tools.append(cast(ToolSchema, {"type": "function", "function": function}))
    return tools


def make_response(params: Mapping[str, Any], messages: Sequence[Message], *, is_cut: bool) -> dict[str, Any]:
    """The response object of Responses for all messages after the first ones; `is_cut` if the last turn was cut."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": params.get("model") or "unbroken",
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": [item for message in messages for item in _write_items(message)],
        "parallel_tool_calls": params.get("parallel_tool_calls", True),
        "tool_choice": params.get("tool_choice") or "auto",
        "tools": params.get("tools") or [],
    }


def _add_item(messages: list[Message], item: Any, place: str) -> None:
    kind = item.get("type") or "message" if isinstance(item, Mapping) else None
    if kind == "function_call_output":
        content = _read_content(item.get("output"), f"{place}.output")
        messages.append(cast(Message, {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}))
    elif kind == "message" and item.get("role") in ("system", "developer"):
        text = get_text(cast(Any, _read_content(item.get("content"), f"{place}.content")))
        if [message["role"] for message in messages] == ["system"]:
            text = f"{messages.pop()['content']}\n\n{text}"
        messages.append({"role": "system", "content": text})
    elif kind == "message" and item.get("role") == "user":
        messages.append(cast(Message, {"role": "user", "content": _read_content(item.get("content"), place)}))
    elif kind in ("function_call", "reasoning") or (kind == "message" and item.get("role") == "assistant"):
        _add_to_reply(messages, item, kind, place)
    else:
        raise InvalidInputError(
            f"{place} must be a message, a function_call, its function_call_output or reasoning, got {_shorten(item)}"
        )


def _add_to_reply(messages: list[Message], item: Mapping[str, Any], kind: str, place: str) -> None:
    """Add an item of the assistant; those that follow one another are one message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    reply = messages[-1]
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        reply.setdefault("tool_calls", []).append(cast(Any, call))
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        reply["reasoning_content"] = get_text(cast(Any, _read_content(parts, place)))
    else:
        reply["content"] = get_text(reply["content"]) + get_text(cast(Any, _read_content(item.get("content"), place)))


def _read_content(content: Any, place: str) -> str | list[ContentPart]:
    """A text, or parts: texts and images. Parts that are all text are one text."""
    if isinstance(content, str):
        return content
    parts: list[ContentPart] = []
    for k, part in enumerate(content if isinstance(content, list) else [content]):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _TEXTS and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "input_image" and part.get("image_url"):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            raise InvalidInputError(f"{place}[{k}] must be a text or an image with a URL, got {_shorten(part)}")
    return get_text(parts) if all(part["type"] == "text" for part in parts) else parts


def _write_items(message: Message) -> Iterator[Item]:
    if message["role"] == "tool":
        output = get_text(message["content"])
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": output}
        return
    text, reasoning, calls = get_text(message["content"]), get_reasoning(message), message.get("tool_calls") or []
    if message["role"] != "assistant":
        yield {"type": "message", "role": message["role"], "content": text}
        return
    if reasoning:
        yield {"type": "reasoning", "id": _make_id("rs"), "summary": [{"type": "summary_text", "text": reasoning}]}
    if text or not (reasoning or calls):
        part = {"type": "output_text", "text": text, "annotations": []}
        yield {
            "type": "message",
            "id": _make_id("msg"),
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }
    for call in calls:
        arguments = call["function"]["arguments"]
        yield {
            "type": "function_call",
            "id": _make_id("fc"),
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
            "status": "completed",
        }


def _make_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _shorten(value: Any) -> str:
    return repr(value)[:200]
