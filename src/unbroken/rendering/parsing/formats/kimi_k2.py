r"""Kimi K2: a call's id has the name of the function and the number of earlier calls in the conversation.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
    <|tool_calls_section_end|>

The id `functions.add:0` is kept, because the template writes it again, and the model refers to its calls by it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.json_calls import read_named_call

_ID = re.compile(r"(?:functions\.)?(?P<name>[^\s:]+)(?P<number>:\d+)?")
_END_OF_SECTION = "<|tool_calls_section_end|>"


def _read(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    pieces = list(body.split())
    if len(pieces) != 2:
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]
    call_id = pieces[0][1].strip()
    found = _ID.fullmatch(call_id)
    if found is None:
        return [CallAttempt(status=ToolCallStatus.MISSING_NAME)]
    return [read_named_call(found["name"], pieces[1][1], call_id=call_id if found["number"] else "")]


KIMI_K2 = CallFormat(
    name="kimi_k2",
    regions=(
        reasoning_region(),
        call_region(
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            _read,
            ended_by=(_END_OF_SECTION,),
            inner_delimiters=("<|tool_call_argument_begin|>",),
        ),
    ),
    separators=("<|tool_calls_section_begin|>", _END_OF_SECTION),
    hints=("<|tool_calls_section_begin|>",),
)
