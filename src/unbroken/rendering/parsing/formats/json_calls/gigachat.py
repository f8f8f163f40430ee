r"""GigaChat 3.1: one JSON object behind a control token, up to the end of the turn.

Let me see.<|function_call|>{"name": "add", "arguments": {"a": 1}}<|message_sep|>
                            `------------ one call --------------´
"""

from __future__ import annotations

from unbroken.rendering.base import PartKind
from unbroken.rendering.parsing.call_format import CallFormat, Region, reasoning_region
from unbroken.rendering.parsing.syntax.json_calls import make_json_call_reader

_OPENING, _END = "<|function_call|>", "<|message_sep|>"

GIGACHAT = CallFormat(
    name="gigachat",
    regions=(
        reasoning_region(),
        Region(
            kind=PartKind.TOOL_CALL, opening=_OPENING, ended_by=(_OPENING, _END), read_calls=make_json_call_reader()
        ),
    ),
    message_separators=(_END,),
    hints=(_OPENING,),
)
