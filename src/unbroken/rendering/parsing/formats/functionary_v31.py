r"""Functionary 3.1: the JSON arguments of a call between tags with its name; for `python`, behind a control token.

Let me see.<function=add>{"a": 1}</function><function=now>{}</function><|eom_id|>
           `------- one call -------------´ `------ another ----------´
<|python_tag|>{"code": "1 + 1"}<|eom_id|>

Code behind `<|python_tag|>` that is not a JSON object is a call that could not be read.
"""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, Region, call_region
from unbroken.rendering.parsing.syntax.json_calls import read_named_call

_OPENING, _CLOSING, _PYTHON, _END = "<function=", "</function>", "<|python_tag|>", "<|eom_id|>"


def _read(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    name, end_of_name, arguments = body.text.partition(">")
    if not end_of_name:
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]
    return [read_named_call(name.strip(), arguments)]


def _read_python(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    return [read_named_call("python", body.text)]


FUNCTIONARY_V31 = CallFormat(
    name="functionary_v31",
    regions=(
        call_region(_OPENING, _CLOSING, _read, ended_by=(_PYTHON, _END)),
        Region(kind=PartKind.TOOL_CALL, opening=_PYTHON, ended_by=(_PYTHON, _OPENING, _END), read_calls=_read_python),
    ),
    separators=(_END,),
    hints=("<function=", "</function>", "<|eom_id|>"),
)
