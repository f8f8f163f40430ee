r"""Muse: messages to `self`, to `user`, or to a tool, with the arguments of a call between tags.

The generation prompt is `<|start|>assistant`, so the first header begins in the middle:

     to=self<|message|>add them<|eom|>                                             reasoning
    <|start|>assistant to=user<|message|>It is 3.<|eot|>                           content
    <|start|>assistant to=add<|message|><atem:function_calls>
    <atem:invoke name="add">
    <atem:parameter name="a">1</atem:parameter>
    </atem:invoke>                                                                 one call, from its `<atem:invoke`
    </atem:function_calls><|eot|>

White space in values and in messages belongs to them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, Header, Region
from unbroken.rendering.parsing.syntax.tags import CallTags, TagReader, TagSyntaxError

_START, _MESSAGE, _CLOSINGS = "<|start|>", "<|message|>", ("<|eom|>", "<|eot|>")
_CALLS, _END_OF_CALLS = "<atem:function_calls>", "</atem:function_calls>"
_TAGS = CallTags(
    opening='<atem:invoke name="',
    end_of_name='">',
    closing="</atem:invoke>",
    parameter='<atem:parameter name="',
    end_of_key='">',
    end_of_parameter="</atem:parameter>",
)
_RECIPIENT = re.compile(r"(?:^|\s)to=(?P<name>\S+)")


def _route(header: CallBody) -> Region:
    found = _RECIPIENT.search(header.text)
    if found is None or found["name"] == "user":
        return _TO_USER
    return _TO_SELF if found["name"] == "self" else _TO_TOOL


def _read(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    tags = TagReader(body)
    attempts: list[CallAttempt] = []
    stop = 0
    name = ""
    try:
        tags.expect(_CALLS)
        while tags.is_at(_TAGS.opening):
            attempts.append(_TAGS.read(tags, tools))
            stop = tags.position
        tags.expect(_END_OF_CALLS)
        if tags.is_at_end():
            return attempts
    except TagSyntaxError as error:
        name = error.name
    if not attempts:
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX, name=name)]
    stop += len(body.text[stop:]) - len(body.text[stop:].lstrip())
    return [*attempts, CallAttempt(status=ToolCallStatus.INVALID_SYNTAX, name=name, span=(stop, len(body.text)))]


_TO_SELF = Region(kind=PartKind.REASONING, closings=_CLOSINGS, ended_by=(_START,), keeps_white_space=True)
_TO_USER = Region(kind=PartKind.CONTENT, closings=_CLOSINGS, ended_by=(_START,), keeps_white_space=True)
_TO_TOOL = Region(
    kind=PartKind.TOOL_CALL,
    closings=_CLOSINGS,
    ended_by=(_START,),
    inner_delimiters=(_CALLS, _END_OF_CALLS, *_TAGS.inner_delimiters),
    read_calls=_read,
)

MUSE = CallFormat(
    name="muse",
    regions=(_TO_SELF, _TO_USER, _TO_TOOL),
    header=Header(closings=(_MESSAGE,), route=_route, inner_delimiters=(_START,)),
    hints=("<atem:invoke",),
)
