r"""MiniMax M3: arguments are elements named by their keys, nested like their values. Each tag begins with a token.

With `#` for this token, `]<]minimax[>[`:

<mm:think>add them</mm:think>Let me see.#<tool_call>
#<invoke name="add">#<a>1#</a>#<days>#<item>monday#</item>#<item>friday#</item>#</days>#</invoke>
#</tool_call>

Elements are converted to values by the tool's schema:

schema               element                                   value
string, integer ..   text                                      as in `syntax.arguments`
array                <item>1</item><item>2</item>, nothing     [1, 2], []
object               <a>1</a>, nothing                         {"a": 1}, {}
none                 elements that are all named `item`        a list; else an object

A turn without reasoning begins with `</mm:think>`. Arguments that are null are
left out by the template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.arguments import convert_value, find_parameters, find_types, resolve_schema
from unbroken.rendering.parsing.syntax.tags import TagReader, TagSyntaxError

_TOKEN = "]<]minimax[>["
_INVOKE, _END_OF_INVOKE = f'{_TOKEN}<invoke name="', f"{_TOKEN}</invoke>"
_OPENING, _CLOSING = f"{_TOKEN}<", f"{_TOKEN}</"
_MAX_DEPTH = 50
_ITEM = "item"
_MAY_BE_EMPTY = {"array", "object", "null"}

_Element: TypeAlias = "str | list[tuple[str, _Element]]"
"""The text of an element, or the elements in it with their names."""


def _read(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    tags = TagReader(body)
    attempts: list[CallAttempt] = []
    while not tags.is_at_end():
        start = tags.position
        try:
            attempts.append(_read_call(tags, tools))
        except TagSyntaxError as error:
            span = (start, len(body.text))
            attempts.append(CallAttempt(status=ToolCallStatus.INVALID_SYNTAX, name=error.name, span=span))
            break
    return attempts


def _read_call(tags: TagReader, tools: Sequence[ToolSchema]) -> CallAttempt:
    start = tags.position
    tags.expect(_INVOKE)
    name = tags.read_until_text('">').strip()
    try:
        elements = _read_elements(tags, 0)
        tags.expect(_END_OF_INVOKE)
        arguments = _convert_elements(elements, name, tools)
    except TagSyntaxError as error:
        error.name = name
        raise
    span = (start, tags.position)
    if not name:
        return CallAttempt(status=ToolCallStatus.MISSING_NAME, span=span)
    return CallAttempt(status=ToolCallStatus.OK, name=name, arguments=arguments, span=span)


def _read_elements(tags: TagReader, depth: int) -> list[tuple[str, _Element]]:
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


def _read_value(tags: TagReader, depth: int) -> _Element:
    text = tags.read_until_next()
    if not tags.is_just_at(_OPENING):
        return text
    if text.strip():
        raise TagSyntaxError("text beside elements")
    return _read_elements(tags, depth + 1)


def _convert_elements(
    elements: Sequence[tuple[str, _Element]], name: str, tools: Sequence[ToolSchema]
) -> dict[str, Any]:
    """Convert the arguments of a call of the function `name`. Raises `TagSyntaxError` if one is given twice."""
    parameters = find_parameters(name, tools)
    return _convert_object(elements, parameters, parameters)


def _convert(element: _Element, schema: Any, root: Mapping[str, Any]) -> Any:
    schema = resolve_schema(schema, root)
    types = find_types(schema, root)
    if isinstance(element, str):
        if not element.strip() and types is not None and "string" not in types and types & _MAY_BE_EMPTY:
            return _make_empty(types)
        return convert_value(element, schema, root)
    is_list = "array" in types if types is not None else all(name == _ITEM for name, _ in element)
    if is_list:
        items = schema.get("items") if isinstance(schema, Mapping) else None
        return [_convert(item, items, root) for _, item in element]
    return _convert_object(element, schema, root)


def _make_empty(types: set[str]) -> Any:
    """The value that an element without text has under these types."""
    if "array" in types:
        return []
    return {} if "object" in types else None


def _convert_object(elements: Sequence[tuple[str, _Element]], schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    schemas = properties if isinstance(properties, Mapping) else {}
    others = schema.get("additionalProperties") if isinstance(schema, Mapping) else None
    values: dict[str, Any] = {}
    for key, element in elements:
        if key in values:
            raise TagSyntaxError(f"{key} is given twice")
        values[key] = _convert(element, schemas.get(key, others), root)
    return values


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
