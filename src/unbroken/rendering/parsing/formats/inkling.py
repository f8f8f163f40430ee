r"""Inkling: each part of a turn is a message, and a token after the name says what it holds.

The generation prompt is `<|message_model|>`, so the first header begins in the middle:

<|content_thinking|>add them<|end_message|>
<|message_model|><|content_text|>Let me see.<|end_message|>
<|message_model|>add<|content_invoke_tool_json|>{"name":"add","args":{"a":1}}<|end_message|>
<|content_model_end_sampling|>

(without the newlines). A call's span is its message with its header.
"""

from __future__ import annotations

from unbroken.rendering.base import PartKind
from unbroken.rendering.parsing.call_format import CallBody, CallFormat, Header, Region
from unbroken.rendering.parsing.syntax.json_calls import make_json_call_reader

_MESSAGE, _END, _LAST = "<|message_model|>", "<|end_message|>", "<|content_model_end_sampling|>"
_THINKING, _TEXT, _CALL = "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"
_ENDS = (_MESSAGE, _LAST)

_REGIONS = {
    _THINKING: Region(kind=PartKind.REASONING, closings=(_END,), ended_by=_ENDS, keeps_white_space=True),
    _TEXT: Region(kind=PartKind.CONTENT, closings=(_END,), ended_by=_ENDS, keeps_white_space=True),
    _CALL: Region(
        kind=PartKind.TOOL_CALL,
        closings=(_END,),
        ended_by=_ENDS,
        read_calls=make_json_call_reader(arguments_keys=("args",)),
    ),
}


def _route(header: CallBody) -> Region:
    return _REGIONS[header.closing]


INKLING = CallFormat(
    name="inkling",
    regions=tuple(_REGIONS.values()),
    header=Header(closings=tuple(_REGIONS), route=_route, inner_delimiters=_ENDS),
    hints=(_CALL,),
)
