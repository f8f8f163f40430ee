r"""MiniMax M3: arguments are elements named by their keys, nested like their values. Each tag begins with a token.

With `#` for this token, `]<]minimax[>[`:

<mm:think>add them</mm:think>Let me see.#<tool_call>
#<invoke name="add">#<a>1#</a>#<days>#<item>monday#</item>#<item>friday#</item>#</days>#</invoke>
#</tool_call>

The items of a list are elements named `item`. The tool's schema says the types of values, and tells an empty list or
object from an empty string. A turn without reasoning begins with `</mm:think>`. Arguments that are null are
left out by the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import Body, CallAttempt, CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.elements import Element, convert_elements
from unbroken.rendering.parsing.syntax.tags import TagReader, TagSyntaxError

_TOKEN = "]<]minimax[>["
_INVOKE, _END_OF_INVOKE = f'{_TOKEN}<invoke name="', f"{_TOKEN}</invoke>"
_OPENING, _CLOSING = f"{_TOKEN}<", f"{_TOKEN}</"
_MAX_DEPTH = 50


def _read(body: Body, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    tags = TagReader(body)
    attempts: list[CallAttempt] = []
    while not tags.is_at_end():
        start = tags.position
        try:
            attempts.append(_read_call(tags, tools))
        except TagSyntaxError:
            attempts.append(CallAttempt(status=ToolCallStatus.INVALID_SYNTAX, span=(start, len(body.text))))
            break
    return attempts


def _read_call(tags: TagReader, tools: Sequence[ToolSchema]) -> CallAttempt:
    start = tags.position
    tags.expect(_INVOKE)
    name = tags.read_until_text('">').strip()
    elements = _read_elements(tags, 0)
    tags.expect(_END_OF_INVOKE)
    span = (start, tags.position)
    if not name:
        return CallAttempt(status=ToolCallStatus.MISSING_NAME, span=span)
    arguments = convert_elements(elements, name, tools)
    return CallAttempt(status=ToolCallStatus.OK, name=name, arguments=arguments, span=span)


def _read_elements(tags: TagReader, depth: int) -> list[tuple[str, Element]]:
    if depth > _MAX_DEPTH:
        raise TagSyntaxError(f"more than {_MAX_DEPTH} elements in elements")
    elements = []
    while tags.is_at(_OPENING):
        tags.expect(_OPENING)
        name = tags.read_until_text(">")
        elements.append((name, _read_value(tags, depth)))
        tags.expect(_CLOSING)
        if tags.read_until_text(">") != name:
            raise TagSyntaxError(f"expected the end of {name}")
    return elements


def _read_value(tags: TagReader, depth: int) -> Element:
    text = tags.read_until_next()
    if not tags.is_just_at(_OPENING):
        return text
    if text.strip():
        raise TagSyntaxError("text beside elements")
    return _read_elements(tags, depth + 1)


MINIMAX_M3 = CallFormat(
    name="minimax_m3",
    regions=(
        replace(reasoning_region("<mm:think>", "</mm:think>"), closes_alone=True),
        call_region(
            f"{_TOKEN}<tool_call>",
            f"{_TOKEN}</tool_call>",
            _read,
            inner_delimiters=(_INVOKE, _END_OF_INVOKE, _OPENING, _CLOSING),
        ),
    ),
    hints=(_TOKEN,),
)
