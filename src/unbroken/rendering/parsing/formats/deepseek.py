r"""DeepSeek V3, R1 and V3.1: control tokens around each call, with its arguments in a JSON code fence until V3.1.

V3 and R1:
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add
    ```json
    {"a": 1}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3.1:
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

A call's span is from `<｜tool▁call▁begin｜>` to `<｜tool▁call▁end｜>`; the delimiters of the section are markup.
"""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.json_calls import read_named_call

_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"
_END_OF_SECTION = "<｜tool▁calls▁end｜>"


def _read(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    pieces = list(body.split())
    if len(pieces) != 2:
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]
    (_, before), (_, after) = pieces
    name, fence, fenced = after.rstrip().partition(_FENCE)
    if before.strip() == "function" and fence and fenced.endswith(_FENCE):
        return [read_named_call(name.strip(), fenced.removesuffix(_FENCE).removeprefix("json"))]
    return [read_named_call(before.strip(), after)]


DEEPSEEK = CallFormat(
    name="deepseek",
    regions=(
        reasoning_region(),
        call_region(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            _read,
            ended_by=(_END_OF_SECTION,),
            inner_delimiters=(_SEPARATOR,),
        ),
    ),
    separators=("<｜tool▁calls▁begin｜>", _END_OF_SECTION),
    hints=("<｜tool▁call▁begin｜>",),
)
