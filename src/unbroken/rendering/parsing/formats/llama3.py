r"""Llama 3: JSON calls, which are the whole turn and begin with `{` or after `<|python_tag|>`.

    {"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}<|eot_id|>
    `--------------- one call ------------´  `------------ another ---------´

    <|python_tag|>search.call(query="tides")<|eom_id|>        a built-in tool

A JSON object without the keys of a call is content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, Region
from unbroken.rendering.parsing.syntax.json_calls import make_json_calls_reader, read_call_object
from unbroken.rendering.parsing.syntax.python_calls import read_python_calls

_BUILT_IN = re.compile(r"\s*[A-Za-z_][\w.]*\.call\(")
_LOOKS_LIKE_CALL = re.compile(r'\s*\{\s*"(?:name|type|function|parameters|arguments)"\s*:')

_ARGUMENTS = ("parameters", "arguments")
_read_json_calls = make_json_calls_reader(arguments_keys=_ARGUMENTS)


def _read_untagged_object(value: Any, span: tuple[int, int]) -> CallAttempt:
    """Read an object that no token marks as a call: `{"name": "Ada", "age": 3}` may be an answer in JSON."""
    attempt = read_call_object(value, arguments_keys=_ARGUMENTS, span=span)
    if attempt.status is ToolCallStatus.OK and not any(key in value for key in _ARGUMENTS):
        return CallAttempt(status=ToolCallStatus.INVALID_ARGUMENTS, name=attempt.name, span=span)
    return attempt


_read_untagged_calls = make_json_calls_reader(read_object=_read_untagged_object)


def _read_tagged(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    """Read a call, or code for an interpreter, which is not JSON."""
    if not _BUILT_IN.match(body.text):
        return _read_json_calls(body, tools)
    return [replace(call, name=call.name.removesuffix(".call")) for call in read_python_calls(body, tools)]


def read_untagged(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    """Read calls that begin a turn; other JSON is content."""
    attempts = _read_untagged_calls(body, tools)
    if any(attempt.status is ToolCallStatus.OK for attempt in attempts) or _LOOKS_LIKE_CALL.match(body.text):
        return attempts
    return ()


LLAMA3 = CallFormat(
    name="llama3",
    regions=(
        Region(
            kind=PartKind.TOOL_CALL,
            opening="<|python_tag|>",
            ended_by=("<|eom_id|>", "<|python_tag|>"),
            read_calls=_read_tagged,
        ),
        Region(
            kind=PartKind.TOOL_CALL,
            starts_with="{",
            ended_by=("<|eom_id|>", "<|python_tag|>"),
            read_calls=read_untagged,
        ),
    ),
    separators=("<|eom_id|>",),
    hints=("<|start_header_id|>", "<|eot_id|>"),
)
