"""Conversations with the tools of real APIs, made of the data of the package `bfcl-eval`.

It has questions, the calls that answer them, and the schemas of calls and results; a result has the fields of its
schema, with values from what the conversation's API holds: files, messages, tickets.
"""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}
"""The file with the schemas of each API."""
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""Words for types that are those of Python, not of JSON Schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolConversation:
    """A conversation, and the tools that it may call."""

    messages: tuple[Any, ...]
    tools: tuple[Any, ...]


def read_conversations(folder: Path) -> list[ToolConversation]:
    """All conversations of a folder that `tools/real_model.py --conversations` has made."""
    name = "BFCL_v4_multi_turn_base.json"
    questions, calls = _read_lines(folder / name), _read_lines(folder / "possible_answer" / name)
    schemas = {api: _read_lines(folder / "multi_turn_func_doc" / f"{file}.json") for api, file in _FILES.items()}
    return [
        _make_conversation(
            row, answer["ground_truth"], [each for api in row["involved_classes"] for each in schemas[api]]
        )
        for row, answer in zip(questions, calls, strict=True)
    ]


def _make_conversation(row: Any, calls: list[list[str]], schemas: list[Any]) -> ToolConversation:
    by_name = {schema["name"]: schema for schema in reversed(schemas)}
    values = itertools.cycle(list(_leaves(row["initial_config"])) or ["done"])
    messages: list[Any] = []
    numbers = itertools.count()
    for asked, answered in zip(row["question"], calls, strict=True):
        messages += asked
        for call in answered:
            name, arguments = _read_call(call, by_name)
            call_id = f"call{next(numbers):05d}"
            function = {"name": name, "arguments": arguments}
            turn = {"role": "assistant", "content": ""}
            messages.append({**turn, "tool_calls": [{"id": call_id, "type": "function", "function": function}]})
            result = json.dumps(_fill(by_name[name]["response"], values))
            messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": result})
        messages.append({"role": "assistant", "content": f"That took {len(answered)} calls."})
    tools = tuple(
        {
            "type": "function",
            "function": {
                "name": name,
                "description": schema["description"],
                "parameters": _translate(schema["parameters"]),
            },
        }
        for name, schema in by_name.items()
    )
    return ToolConversation(messages=tuple(messages), tools=tools)


def _read_call(text: str, by_name: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call in Python: `sort('report.pdf')` is ("sort", {"file_name": "report.pdf"})."""
    call: Any = ast.parse(text, mode="eval").body
    name = call.func.id
    names = list(by_name[name]["parameters"]["properties"])
    given = dict(zip(names, call.args, strict=False)) | {each.arg: each.value for each in call.keywords}
    values = {key: ast.literal_eval(value) for key, value in given.items()}
    return name, json.loads(json.dumps(values))  # a tuple is a list in JSON


def _fill(schema: Any, values: Iterator[Any]) -> Any:
    """A result of this schema."""
    if properties := schema.get("properties"):
        return {name: _fill(of_name, values) for name, of_name in properties.items()}
    if "items" in schema:
        return [_fill(schema["items"], values) for _ in range(2)]
    return next(values)


def _translate(schema: Any) -> Any:
    """The schema with JSON Schema's words for types."""
    if isinstance(schema, list):
        return [_translate(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    own = {key: _translate(value) for key, value in schema.items()}
    if isinstance(kind := own.get("type"), str):
        own["type"] = _TYPES.get(kind, kind)
    return own


def _leaves(value: Any) -> Iterator[Any]:
    """The strings and numbers in a nested value."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    elif value is not None:
        yield value


def _read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]
