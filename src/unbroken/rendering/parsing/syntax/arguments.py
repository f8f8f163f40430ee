"""Converts arguments that a format writes as text to values, by the tool's schema.

schema               text                         value
string               5, null                      "5", "null": always the text
string, default null null                         null: the default is a value too
integer, array ..    5, [1, 2]                    5, [1, 2]: the text as JSON
boolean, null        true, True, None             true, true, null: some templates write Python's words,
array, object        ['a', None]                  ["a", null]: and Python's lists and dictionaries
string or integer    5, five                      5, "five": JSON if it has the other type, else the text
integer              five                         "five": the text, which the tool can refuse
no schema            5, {"a": 1}, five, NaN       5, {"a": 1}, "five", "NaN": JSON if it is valid, else the text
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unbroken.messages import ToolSchema
from unbroken.rendering.parsing.syntax.json_calls import read_json
from unbroken.rendering.parsing.syntax.python_calls import read_python_value

_MAX_REFERENCE_DEPTH = 8
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_STRING = {"type": "string"}


def convert_arguments(
    texts: Mapping[str, str],
    name: str,
    tools: Sequence[ToolSchema],
    *,
    are_strings: Mapping[str, bool] | None = None,
    writes_python: bool = False,
) -> dict[str, Any]:
    """Convert the arguments of a call of the function `name`.

    `are_strings` has the arguments that the call itself marks as a string or not: their schemas are ignored. With
    `writes_python`, Python's lists and dictionaries are read without a schema too.
    """
    parameters = find_parameters(name, tools)
    properties = parameters.get("properties")
    schemas = dict(properties) if isinstance(properties, Mapping) else {}
    schemas |= {key: _STRING if is_string else None for key, is_string in (are_strings or {}).items()}
    return {
        key: convert_value(text, schemas.get(key), parameters, writes_python=writes_python)
        for key, text in texts.items()
    }


def convert_value(text: str, schema: Any, root: Mapping[str, Any], *, writes_python: bool = False) -> Any:
    """Convert one argument; `root` is the schema that references in `schema` point into."""
    types = find_types(schema, root)
    if types == {"string"}:
        return text
    try:
        value = read_json(text)
    except ValueError:
        if types is None:
            types = {"array", "object"} if writes_python else set()
        return _convert_python(text, types)
    if types is None or "string" not in types:
        return value
    others = types - {"string"} | ({"integer"} if "number" in types else set())
    return value if _get_type(value) in others else text


def _convert_python(text: str, types: set[str]) -> Any:
    """Convert a word, list or dictionary of Python if the schema allows it; otherwise return the text."""
    word = text.strip()
    if word in _PYTHON_WORDS:
        return _PYTHON_WORDS[word] if _get_type(_PYTHON_WORDS[word]) in types else text
    if not types & {"array", "object"}:
        return text
    try:
        value = read_python_value(word)
    except ValueError:
        return text
    return value if _get_type(value) in types & {"array", "object"} else text


def find_parameters(name: str, tools: Sequence[ToolSchema]) -> Mapping[str, Any]:
    """Find the schema of a function's arguments; empty if the function or its schema is missing."""
    for tool in tools:
        function: Any = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


def list_names(tools: Sequence[ToolSchema]) -> list[str]:
    """The names of functions; a tool of another kind, which a template may show all the same, has none."""
    functions: list[Any] = [tool.get("function") for tool in tools]
    names = [function.get("name") for function in functions if isinstance(function, Mapping)]
    return [name for name in names if isinstance(name, str)]


def resolve_schema(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follow the references of a schema, such as `#/$defs/Name`, if it is one."""
    for _ in range(_MAX_REFERENCE_DEPTH):
        if not (isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str)):
            break
        schema = _resolve(schema["$ref"], root)
    return schema


def find_types(schema: Any, root: Mapping[str, Any]) -> set[str] | None:
    """Find the JSON types that a schema allows; None if it does not say."""
    return _find_types(schema, root, 0)


def _find_types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str] | None:
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCE_DEPTH:
        return None
    if isinstance(schema.get("$ref"), str):
        return _find_types(_resolve(schema["$ref"], root), root, depth + 1)
    if isinstance(schema.get("type"), (str, list)):
        return _read_type(schema)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return _union(_find_types(option, root, depth + 1) for option in schema[key])
    return _read_values(schema)


def _read_type(schema: Mapping[str, Any]) -> set[str]:
    """The types that the key `type` of a schema names."""
    if isinstance(schema["type"], str):
        return {schema["type"], "null"} if _may_be_null(schema) else {schema["type"]}
    return {name for name in schema["type"] if isinstance(name, str)}


def _read_values(schema: Mapping[str, Any]) -> set[str] | None:
    """The types of the values that a schema lists; None if it lists none."""
    if isinstance(schema.get("enum"), list):
        return {_get_type(value) for value in schema["enum"]}
    return {_get_type(schema["const"])} if "const" in schema else None


def _may_be_null(schema: Mapping[str, Any]) -> bool:
    # A default of null is a value, whatever the type says: `city: str = None` has the type "string".
    return schema.get("nullable") is True or ("default" in schema and schema["default"] is None)


def _union(options: Iterable[set[str] | None]) -> set[str] | None:
    types: set[str] = set()
    for option in options:
        if option is None:
            return None
        types |= option
    return types


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Resolve a reference such as `#/$defs/Name`."""
    target: Any = root
    for key in reference.removeprefix("#/").split("/"):
        target = target.get(key) if isinstance(target, Mapping) else None
    return target


def _get_type(value: Any) -> str:
    if value is None:
        return "null"
    names = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (dict, "object"))
    return next((name for kind, name in names if isinstance(value, kind)), "array")
