"""Converts nested elements to arguments, by the tool's schema.

schema               element                                   value
string, integer ..   text                                      as in `syntax.arguments`
array                <item>1</item><item>2</item>, nothing     [1, 2], []
object               <a>1</a>, nothing                         {"a": 1}, {}
none                 elements that are all named `item`        a list; else an object
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from unbroken.messages import ToolSchema
from unbroken.rendering.parsing.syntax.arguments import convert_value, find_parameters, find_types, resolve_schema
from unbroken.rendering.parsing.syntax.tags import TagSyntaxError

Element: TypeAlias = "str | list[tuple[str, Element]]"
"""The text of an element, or the elements in it with their names."""

_ITEM = "item"
_MAY_BE_EMPTY = {"array", "object", "null"}


def convert_elements(elements: Sequence[tuple[str, Element]], name: str, tools: Sequence[ToolSchema]) -> dict[str, Any]:
    """Convert the arguments of a call of the function `name`. Raises `TagSyntaxError` if one is given twice."""
    parameters = find_parameters(name, tools)
    return _convert_object(elements, parameters, parameters)


def _convert(element: Element, schema: Any, root: Mapping[str, Any]) -> Any:
    schema = resolve_schema(schema, root)
    types = find_types(schema, root)
    if isinstance(element, str):
        if not element.strip() and types is not None and "string" not in types and types & _MAY_BE_EMPTY:
            return [] if "array" in types else {} if "object" in types else None
        return convert_value(element, schema, root)
    is_list = "array" in types if types is not None else all(name == _ITEM for name, _ in element)
    if is_list:
        items = schema.get("items") if isinstance(schema, Mapping) else None
        return [_convert(item, items, root) for _, item in element]
    return _convert_object(element, schema, root)


def _convert_object(elements: Sequence[tuple[str, Element]], schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    schemas = properties if isinstance(properties, Mapping) else {}
    others = schema.get("additionalProperties") if isinstance(schema, Mapping) else None
    values: dict[str, Any] = {}
    for key, element in elements:
        if key in values:
            raise TagSyntaxError(f"{key} is given twice")
        values[key] = _convert(element, schemas.get(key, others), root)
    return values
