"""One value of a config: from what the command line or a TOML file says to the type of its field."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from unbroken.errors import InvalidInputError


def from_text(kind: Any, text: str, *, name: str) -> Any:
    """A word of the command line as a value.

    `none` stands for None where that is allowed. A list is written as in TOML, or as its entries with commas between:
    `["a", "b"]` or `a,b`.

    Raises:
        InvalidInputError: it is no such value; the message begins with `name`.
    """
    if text.lower() == "none" and types.NoneType in typing.get_args(kind):
        return None
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and members[1:] == (...,) and not text.lstrip().startswith("["):
        return tuple(from_text(members[0], word.strip(), name=name) for word in text.split(",") if word.strip())
    if origin is tuple and not text.lstrip().startswith("["):
        text = f"[{text}]"
    if origin in (tuple, dict, Mapping):
        return from_toml(kind, toml_of(text, name=name), name=name)
    return _validated(_adapter(kind, name).validate_strings, text, text, name)


def from_toml(kind: Any, value: Any, *, name: str, folder: Path | None = None) -> Any:
    """A value of a TOML file, whose paths are relative to `folder`.

    Raises:
        InvalidInputError: it is of another type; the message begins with `name`.
    """
    adapter = _adapter(kind, name)
    # JSON's strict mode takes a list for a tuple and a string for an enum or a path, but no "3" for a number.
    read = _validated(
        lambda text: adapter.validate_json(text, strict=True), json.dumps(value, default=str), value, name
    )
    return _placed(read, folder)


def plain(value: Any) -> Any:
    """A value as JSON can hold it, so that equal ones are equal there."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def shown(value: Any) -> str:
    """A value as it is written on a command line."""
    told = plain(value)
    if isinstance(told, str):
        return told or '""'
    return "none" if told is None else _toml(told)


def _toml(told: Any) -> str:
    if isinstance(told, list):
        return f"[{', '.join(map(_toml, told))}]"
    if isinstance(told, dict):
        names = {name: name if name.isidentifier() else json.dumps(name) for name in told}
        return f"{{{', '.join(f'{names[name]} = {_toml(value)}' for name, value in told.items())}}}"
    return json.dumps(told)


def kind_in_words(kind: Any) -> str:
    """A type as the help shows it: `INT`, `{grpo,rloo}`, `[TEXT,...]`."""
    members = [member for member in typing.get_args(kind) if member is not types.NoneType]
    if isinstance(kind, types.UnionType):
        return "|".join(kind_in_words(member) for member in members)
    if typing.get_origin(kind) is tuple:
        return f"[{','.join('...' if member is ... else kind_in_words(member) for member in members)}]"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"{{{','.join(str(member.value) for member in kind)}}}"
    if dataclasses.is_dataclass(kind):
        return f"{{{','.join(field.name for field in dataclasses.fields(kind))}}}"
    return {int: "INT", float: "FLOAT", bool: "BOOL", str: "TEXT", Path: "PATH"}.get(kind, "TOML")


def toml_of(text: str, *, name: str) -> Any:
    """A value written as in TOML.

    Raises:
        InvalidInputError: it is none; the message begins with `name`.
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{name} must be written as in TOML, got {text!r}: {error}") from None


def _adapter(kind: Any, name: str) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(kind)
    except PydanticSchemaGenerationError:
        raise InvalidInputError(f"{name} cannot be set: nothing that can be written is a {kind}") from None


def _validated(validate: Callable[[str], Any], text: str, value: Any, name: str) -> Any:
    try:
        return validate(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        is_rule = first["msg"].startswith("Input should ")
        rule = (
            first["msg"].removeprefix("Input should ").partition(", unable to")[0]
            if is_rule
            else f"be whole: {first['msg']}"
        )
        raise InvalidInputError(f"{name}{place} must {rule}, got {value!r}") from None


def _placed(value: Any, folder: Path | None) -> Any:
    if folder is None:
        return value
    if isinstance(value, Path):
        return folder / value
    return tuple(_placed(item, folder) for item in value) if isinstance(value, tuple) else value
