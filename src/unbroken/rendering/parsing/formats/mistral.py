r"""Mistral: a JSON list after `[TOOL_CALLS]`, or, since tokenizer version 11, one call after each.

    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "9aF2kQ0zX"}, {...}]</s>
    [TOOL_CALLS]add[CALL_ID]9aF2kQ0zX[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}</s>
    [THINK]add them[/THINK]It is 3.</s>

In a list, a call's span is its object; in the other form it is everything from `[TOOL_CALLS]` to the next one. Call ids
that the model writes are kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, Region, reasoning_region
from unbroken.rendering.parsing.syntax.json_calls import make_json_calls_reader, read_named_call

_OPENING, _CALL_ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAMED = re.compile(r"\s*(?P<name>[\w.\-]+)\s*(?P<arguments>\{.*)", re.DOTALL)

_read_list = make_json_calls_reader()


def _read(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    if not body.inner_delimiters:
        named = _NAMED.fullmatch(body.text)
        return _read_list(body, tools) if named is None else [read_named_call(named["name"], named["arguments"])]
    (_, name), *others = body.split()
    found = dict(others)
    if [delimiter for delimiter, _ in others] not in ([_ARGUMENTS], [_CALL_ID, _ARGUMENTS]):
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]
    return [read_named_call(name.strip(), found[_ARGUMENTS], call_id=found.get(_CALL_ID, "").strip())]


MISTRAL = CallFormat(
    name="mistral",
    regions=(
        reasoning_region("[THINK]", "[/THINK]"),
        Region(
            kind=PartKind.TOOL_CALL,
            opening=_OPENING,
            ended_by=(_OPENING,),
            inner_delimiters=(_CALL_ID, _ARGUMENTS),
            read_calls=_read,
        ),
    ),
    hints=("[INST]",),
)
