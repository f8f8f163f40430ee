r"""gpt-oss's Harmony: a completion is one or several messages, each with a header that says what it is.

The generation prompt is `<|start|>assistant`, so the first header begins in the middle:

    <|channel|>analysis<|message|>add them<|end|>                                                     reasoning
    <|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>                              content
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>    a call
    <|start|>assistant<|channel|>final<|message|>It is 3.<|return|>                                   content

A message with a recipient is a call. The recipient may be anywhere in the header: templates write `<|start|>assistant
to=functions.add<|channel|>commentary json<|message|>`. Built-in tools have no prefix: `to=python`. A call's span is its
message with its header. White space in a message belongs to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, Header, Region
from unbroken.rendering.parsing.syntax.json_calls import read_named_call

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_CLOSINGS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"(?:^|\s)to=(?P<name>\S*)")
_NOT_TOOLS = ("user", "assistant", "all")


def _find_recipient(header: CallBody) -> str | None:
    for _, text in header.split():
        found = _RECIPIENT.search(text)
        if found is not None and found["name"] not in _NOT_TOOLS:
            return found["name"]
    return None


def _find_channel(header: CallBody) -> str:
    words = next((text.split() for delimiter, text in header.split() if delimiter == _CHANNEL), [])
    return words[0] if words else ""


def _route(header: CallBody) -> Region:
    if _find_recipient(header) is not None:
        return _CALL
    return _ANALYSIS if _find_channel(header) == "analysis" else _CONTENT


def _read(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    name = None if body.header is None else _find_recipient(body.header)
    if name is None:
        return [CallAttempt(status=ToolCallStatus.MISSING_NAME)]
    return [read_named_call(name.removeprefix("functions."), body.text)]


_ANALYSIS = Region(kind=PartKind.REASONING, closings=_CLOSINGS, ended_by=(_START,), keeps_white_space=True)
_CONTENT = Region(kind=PartKind.CONTENT, closings=_CLOSINGS, ended_by=(_START,), keeps_white_space=True)
_CALL = Region(kind=PartKind.TOOL_CALL, closings=_CLOSINGS, ended_by=(_START,), read_calls=_read)

HARMONY = CallFormat(
    name="harmony",
    regions=(_ANALYSIS, _CONTENT, _CALL),
    header=Header(closings=(_MESSAGE,), route=_route, inner_delimiters=(_START, _CHANNEL, _CONSTRAIN)),
    hints=("<|channel|>", "<|message|>", "<|return|>"),
)
