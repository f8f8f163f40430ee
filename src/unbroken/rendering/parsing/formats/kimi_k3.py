r"""Kimi K3: every part of a turn is an element, with tags of several tokens. The prompt opens the thinking.

<|open|>think<|sep|>add them<|close|>think<|sep|>
<|open|>response<|sep|>Let me see.<|close|>response<|sep|>
<|open|>tools<|sep|>
<|open|>call tool="add" index="1"<|sep|>
<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>
<|close|>call<|sep|>
<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>

(without the newlines). An argument of the type `string` is text, any other is JSON. Instead of arguments, a call may
have one element `json` with all of them.
"""

from __future__ import annotations

import html
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
from unbroken.rendering.parsing.syntax.json_calls import read_named_call
from unbroken.rendering.parsing.syntax.tags import CallTags, TagReader, TagSyntaxError


def _open(tag: str) -> str:
    return f"<|open|>{tag}<|sep|>"


def _close(tag: str) -> str:
    return f"<|close|>{tag}<|sep|>"


_JSON = _open('json type="object"')
_TYPES = ("string", "number", "boolean", "null", "object", "array")
_TAGS = CallTags(
    opening='<|open|>call tool="',
    end_of_name="<|sep|>",
    closing=_close("call"),
    parameter='<|open|>argument key="',
    end_of_key='"<|sep|>',
    end_of_parameter=_close("argument"),
    string_attributes={f'type="{name}': name == "string" for name in _TYPES},
    unescape=html.unescape,
)


def _read(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    if not any(inner.delimiter == _JSON for inner in body.inner_delimiters):
        return _TAGS.read_inside(body, tools)
    tags = TagReader(body)
    name = ""
    try:
        name = html.unescape(tags.read_until_text(_TAGS.end_of_name).partition('"')[0]).strip()
        tags.expect(_JSON)
        arguments = tags.read_until(_close("json"))
        if tags.is_at_end():
            return [read_named_call(name, arguments)]
    except TagSyntaxError:
        pass
    return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX, name=name)]


KIMI_K3 = CallFormat(
    name="kimi_k3",
    regions=(
        reasoning_region(_open("think"), _close("think")),
        Region(
            kind=PartKind.CONTENT,
            opening=_open("response"),
            closings=(_close("response"),),
            ended_by=(_open("tools"), _TAGS.opening),
            keeps_white_space=True,
        ),
        call_region(
            _TAGS.opening,
            _TAGS.closing,
            _read,
            ended_by=(_close("tools"),),
            inner_delimiters=(*_TAGS.inner_delimiters, _JSON, _close("json")),
        ),
    ),
    separators=(_open("tools"), _close("tools")),
    message_separators=(_close("message"), "<|end_of_msg|>"),
    hints=("<|open|>", "<|sep|>", "<|end_of_msg|>"),
)
