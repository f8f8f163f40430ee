r"""Calls in Python: a list that is the whole turn, or between delimiters.

    PYTHONIC   [add(a=1, b="two"), now()]<|eot_id|>                              Llama 3.2, Llama 4, ToolACE, Gemma 3
                `--- one call --´  `---´
                                   another
               <|python_start|>[add(a=1)]<|python_end|>                          Llama 4
    TOOL_CODE  Let me see.\n```tool_code\nadd(a=1)\n```<end_of_turn>             Gemma 3
    OLMO3      <function_calls>\nadd(a=1)\nnow()\n</function_calls>             Olmo 3: a call on each line

Some templates for these models write such a list without quotes (`[add(a=two)]`), which is not Python: they are known
by what they ask for.

A turn that begins with a bracket but is not a list of calls is content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import (
    CallAttempt,
    CallBody,
    CallFormat,
    Region,
    call_region,
    reasoning_region,
)
from unbroken.rendering.parsing.syntax.python_calls import read_python_calls

_LOOKS_LIKE_CALL = re.compile(r"\s*\[\s*[^\W\d][\w.\-]*\(")


def _read_first(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    attempts = read_python_calls(body, tools)
    is_call = any(attempt.status is ToolCallStatus.OK for attempt in attempts) or _LOOKS_LIKE_CALL.match(body.text)
    return attempts if is_call else ()


_ENDS = ("<|eom|>", "<|eom_id|>")


def _make_format(name: str, opening: str, closing: str, *, hint: str) -> CallFormat:
    return CallFormat(
        name=name,
        regions=(
            Region(kind=PartKind.TOOL_CALL, opening=opening, closings=(closing,), read_calls=read_python_calls),
            Region(kind=PartKind.TOOL_CALL, starts_with="[", ended_by=(opening, *_ENDS), read_calls=_read_first),
        ),
        separators=_ENDS,
        hints=(hint,),
    )


PYTHONIC = _make_format("pythonic", "<|python_start|>", "<|python_end|>", hint="[func_name1(")
# Arguments may contain fences, but no line of them begins with one: a string has its newlines as escapes.
TOOL_CODE = _make_format("tool_code", "```tool_code", "\n```", hint="```tool_code")
OLMO3 = CallFormat(
    name="olmo3",
    regions=(reasoning_region(), call_region("<function_calls>", "</function_calls>", read_python_calls)),
    hints=("<function_calls>", "</function_calls>"),
)
