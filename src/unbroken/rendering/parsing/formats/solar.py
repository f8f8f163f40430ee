r"""Solar Open: each part of a turn is a message; the prompt ends with `<|begin|>assistant`.

<|think|>add them<|end|>
<|begin|>assistant<|content|>Let me see.<|end|>
<|begin|>assistant<|tool_calls|>
<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>add<|tool_call:args|>{"a": 1}<|tool_call:end|>
<|calls|>

(without the newlines). Call ids that the model writes are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, Region, call_region
from unbroken.rendering.parsing.syntax.json_calls import read_named_call

_BEGIN, _END, _SECTION, _END_OF_SECTION = "<|begin|>assistant", "<|end|>", "<|tool_calls|>", "<|calls|>"
_NAME, _ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"


def _read(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    (_, call_id), *others = body.split()
    if [delimiter for delimiter, _ in others] != [_NAME, _ARGUMENTS]:
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]
    (_, name), (_, arguments) = others
    return [read_named_call(name.strip(), arguments, call_id=call_id.strip())]


SOLAR = CallFormat(
    name="solar",
    regions=(
        Region(
            kind=PartKind.REASONING, opening="<|think|>", closings=(_END,), ended_by=(_BEGIN,), keeps_white_space=True
        ),
        Region(
            kind=PartKind.CONTENT, opening="<|content|>", closings=(_END,), ended_by=(_BEGIN,), keeps_white_space=True
        ),
        call_region(
            "<|tool_call:begin|>",
            "<|tool_call:end|>",
            _read,
            ended_by=(_END_OF_SECTION, _END, _BEGIN),
            inner_delimiters=(_NAME, _ARGUMENTS),
        ),
    ),
    separators=(_SECTION, _END_OF_SECTION),
    message_separators=(_BEGIN, _END),
    hints=("<|tool_call:begin|>",),
)
