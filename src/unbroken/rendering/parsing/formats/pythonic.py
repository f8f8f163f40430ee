r"""Llama 3.2 and Llama 4: a Python list of calls, maybe between `<|python_start|>` and `<|python_end|>`.

    [add(a=1, b="two"), now()]<|eot_id|>
     `--- one call --´  `---´
                        another

A turn that begins with a bracket but is not a list of calls is content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, Region
from unbroken.rendering.parsing.syntax.python_calls import read_python_calls

_LOOKS_LIKE_CALL = re.compile(r"\s*\[\s*[^\W\d][\w.\-]*\(")


def _read_first(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    attempts = read_python_calls(body, tools)
    is_call = any(attempt.status is ToolCallStatus.OK for attempt in attempts) or _LOOKS_LIKE_CALL.match(body.text)
    return attempts if is_call else ()


PYTHONIC = CallFormat(
    name="pythonic",
    regions=(
        Region(
            kind=PartKind.TOOL_CALL,
            opening="<|python_start|>",
            closings=("<|python_end|>",),
            read_calls=read_python_calls,
        ),
        Region(kind=PartKind.TOOL_CALL, starts_with="[", ended_by=("<|eom|>", "<|eom_id|>"), read_calls=_read_first),
    ),
    separators=("<|eom|>", "<|eom_id|>"),
    hints=("<|python_start|>",),
)
