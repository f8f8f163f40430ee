"""Describe a Python function as the JSON schema of a tool, and check arguments against it.

The schema has the form of `transformers.utils.get_json_schema`, which chat templates expect. That function itself loads
torch, and describes every unknown class as an object instead of refusing it.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from unbroken.errors import ToolDefinitionError
from unbroken.messages import ToolSchema

_JSON_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}
_SUPPORTED = "str, int, float, bool, None, Any, list[...], dict[str, ...], Literal[...] and unions of them"


def describe_function(function: Callable[..., Any]) -> ToolSchema:
    """Describe a function that has typed parameters and a Google-style docstring.

    Raises:
        ToolDefinitionError: the function has no docstring, a parameter without a type or a description, a type that
            JSON cannot describe, or parameters that cannot be passed by name (`*args`, `**kwargs`, positional-only).
    """
    name = getattr(function, "__name__", "")
    if not (inspect.isroutine(function) and name.isidentifier()):
        raise ToolDefinitionError(f"a tool must be a function with a name, got {function!r}: define it with def")
    description, documented = _read_docstring(name, inspect.getdoc(function) or "")
    signature, hints = _read_signature(name, function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in signature.parameters.values():
        _check_parameter(name, parameter, hints, documented)
        schema = _describe_type(hints[parameter.name], where=f"tool {name}, parameter {parameter.name}")
        properties[parameter.name] = schema | {"description": documented[parameter.name]}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    unknown = [p for p in documented if p not in properties]
    if unknown:
        raise ToolDefinitionError(f"tool {name}: the docstring's Args describe {unknown}, which are not parameters")
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def find_problem(schema: ToolSchema, arguments: Mapping[str, Any]) -> str | None:
    """Describe for the model the first argument that does not fit the schema; None if all fit."""
    parameters = schema["function"]["parameters"]
    properties: dict[str, Any] = parameters["properties"]
    missing = [p for p in parameters.get("required", ()) if p not in arguments]
    if missing:
        return f"missing argument {missing[0]!r}"
    for name, value in arguments.items():
        if name not in properties:
            return f"unexpected argument {name!r}; the arguments are {list(properties)}"
        if not _fits(value, properties[name]):
            return f"argument {name!r} must be {_format_schema(properties[name])}, got {value!r}"
    return None


def _read_signature(name: str, function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    try:
        return inspect.signature(function), typing.get_type_hints(function)
    except Exception as error:  # annotations are user code: `np.nothing` is an AttributeError
        raise ToolDefinitionError(f"tool {name}: the signature cannot be read: {error}") from error


def _check_parameter(
    name: str, parameter: inspect.Parameter, hints: Mapping[str, Any], documented: Mapping[str, str]
) -> None:
    where = f"tool {name}, parameter {parameter.name}"
    if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
        raise ToolDefinitionError(f"{where}: must be passed by name, got {parameter.kind.description}")
    if parameter.name not in hints:
        raise ToolDefinitionError(f"{where}: needs a type annotation")
    if parameter.name not in documented:
        raise ToolDefinitionError(f"{where}: needs a line `{parameter.name}: ...` under Args: in the docstring")


def _read_docstring(name: str, docstring: str) -> tuple[str, dict[str, str]]:
    """Read the description before the first section, and each parameter's in the Args section."""
    sections = re.split(r"^(Args|Arguments|Returns|Yields|Raises|Examples?|Notes?):[ \t]*$", docstring, flags=re.M)
    description = sections[0].strip()
    if not description:
        raise ToolDefinitionError(f"tool {name}: needs a docstring that begins with what the tool does")
    bodies = dict(zip(sections[1::2], sections[2::2], strict=True))
    body = inspect.cleandoc(_take_indented_lines(bodies.get("Args", bodies.get("Arguments", ""))))
    # An entry starts at the margin; its continuation lines are indented.
    entries = re.findall(r"^(\w+)(?:[ \t]*\([^)\n]*\))?:[ \t]*(.*(?:\n[ \t]+.*|\n(?=\n))*)", body, flags=re.M)
    return description, {parameter: " ".join(text.split()) for parameter, text in entries}


def _take_indented_lines(text: str) -> str:
    match = re.match(r"(?:[ \t]*\n|[ \t]+.*\n?)*", text)
    return match.group() if match else ""


def _describe_type(hint: Any, *, where: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if isinstance(hint, type) and origin is None and hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is list and len(args) == 1:
        return {"type": "array", "items": _describe_type(args[0], where=where)}
    if origin is dict and len(args) == 2 and args[0] is str:
        return {"type": "object", "additionalProperties": _describe_type(args[1], where=where)}
    if origin is Literal and all(type(arg) in _JSON_TYPES for arg in args):
        return {"type": _one_or_list([_JSON_TYPES[type(arg)] for arg in args]), "enum": list(args)}
    if origin in (Union, types.UnionType):
        return _describe_union(args, where=where)
    raise ToolDefinitionError(f"{where}: type {hint!r} cannot be described in JSON; use {_SUPPORTED}")


def _describe_union(args: tuple[Any, ...], *, where: str) -> dict[str, Any]:
    options = [_describe_type(arg, where=where) for arg in args if arg is not type(None)]
    if len(options) == 1:
        schema = options[0]
    elif all(option.keys() == {"type"} for option in options):
        schema = {"type": _one_or_list(sorted(option["type"] for option in options))}
    else:
        schema = {"anyOf": options}
    return schema | {"nullable": True} if type(None) in args else schema


def _one_or_list(names: list[str]) -> str | list[str]:
    distinct = list(dict.fromkeys(names))
    return distinct[0] if len(distinct) == 1 else distinct


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(option) and value == option for option in schema["enum"])
    if "type" not in schema:
        return True
    names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if not any(_is_json_type(value, name) for name in names):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(_fits(item, schema["items"]) for item in value)
    if isinstance(value, dict) and "additionalProperties" in schema:
        return all(_fits(item, schema["additionalProperties"]) for item in value.values())
    return True


def _is_json_type(value: Any, name: str) -> bool:
    if name == "number":
        return type(value) in (int, float)
    return _JSON_TYPES.get(type(value)) == name


def _format_schema(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        words = f"one of {schema['enum']}"
    elif "anyOf" in schema:
        words = " or ".join(_format_schema(option) for option in schema["anyOf"])
    elif "type" not in schema:
        words = "anything"
    else:
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        words = " or ".join(names)
        if "items" in schema:
            words += f" of {_format_schema(schema['items'])}"
        if "additionalProperties" in schema:
            words += f" with values of type {_format_schema(schema['additionalProperties'])}"
    return f"{words} or null" if schema.get("nullable") else words
