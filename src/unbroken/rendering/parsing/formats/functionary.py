r"""Functionary 3.2: a recipient before each part, `all` for text, or a function for a call. The prompt ends with `>>>`.

all\nLet me see.>>>add\n{"a": 1}>>>now\n{}<|eot_id|>
     `-content-´        `-call-´  `------´ another

Text with a `>>>` that is not followed by a name and a line break is content. After the first call there are only calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, Header, Region
from unbroken.rendering.parsing.syntax.json_calls import find_json_values, read_named_call

_OPENING, _ALL = ">>>", "all"
_NAME = re.compile(r"[\w.\-]+")
_NEXT = re.compile(rf"\s*{_OPENING}(?P<name>[\w.\-]+)\n")


def _route(header: CallBody) -> Region | None:
    if header.text == _ALL:
        return _CONTENT
    return _CALLS if _NAME.fullmatch(header.text) else None


def _read(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    """Read the arguments of the call that the header names, then all calls after it, each with its span."""
    assert body.header is not None
    attempts: list[CallAttempt] = []
    name, start, position = body.header.text, 0, 0
    while True:
        value, position = _read_value(body.text, position)
        if not position:
            return [
                *attempts,
                CallAttempt(status=ToolCallStatus.INVALID_JSON, name=name, span=_to_end(body.text, start)),
            ]
        call = read_named_call(name, value, span=(start, position))
        if call.status is not ToolCallStatus.OK:
            return [*attempts, replace(call, span=_to_end(body.text, start))]
        attempts.append(call)
        following = _NEXT.match(body.text, position)
        if following is None:
            break
        name, start, position = following["name"], position, following.end()
    if body.text[position:].strip():
        attempts.append(CallAttempt(status=ToolCallStatus.INVALID_SYNTAX, span=_to_end(body.text, position)))
    return attempts


def _read_value(text: str, position: int) -> tuple[object, int]:
    """Read the next JSON value; returns it and where it ends, or None and 0 without a value."""
    try:
        value, (_, stop) = next(find_json_values(text, position), (None, (0, 0)))
    except ValueError:
        return None, 0
    return value, stop


def _to_end(text: str, start: int) -> tuple[int, int] | None:
    return (start, len(text)) if start < len(text) else None


_CONTENT = Region(kind=PartKind.CONTENT, keeps_white_space=True)
_CALLS = Region(kind=PartKind.TOOL_CALL, read_calls=_read)

FUNCTIONARY = CallFormat(
    name="functionary",
    regions=(_CONTENT, _CALLS),
    header=Header(
        opening=_OPENING, closings=("\n",), route=_route, is_opened_by_prompt=True, is_content_if_unclosed=True
    ),
    hints=(">>>all",),
)
