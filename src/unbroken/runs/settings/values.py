"""One value of a config: parse it from the command line or a TOML file, and write it back."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from unbroken.errors import InvalidInputError
from unbroken.runs.python_files import CommandWord, FunctionName, ModelName


def parse_word(hint: Any, text: str, *, name: str) -> Any:
    """Parse a word of the command line; an `InvalidInputError` begins with `name`.

    `none` stands for None where that is allowed. A list is written as in TOML, `["a", "b"]`, or with commas, `a,b`.
    """
    if text.lower() == "none" and types.NoneType in typing.get_args(hint):
        return None
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and members[1:] == (...,) and not text.lstrip().startswith("["):
        words = tuple(parse_word(members[0], word.strip(), name=name) for word in text.split(",") if word.strip())
        return _resolve_paths(words, Path())
    if origin is tuple and not text.lstrip().startswith("["):
        text = f"[{text}]"
    if origin in (tuple, dict, Mapping):
        return check_toml(hint, parse_toml(text, name=name), name=name, folder=Path())
    return _validate(_adapter(hint, name).validate_strings, text, text, name)


def check_toml(hint: Any, value: Any, *, name: str, folder: Path | None = None) -> Any:
    """Convert a TOML value to `hint`, its paths relative to `folder`; an `InvalidInputError` begins with `name`."""
    adapter = _adapter(hint, name)
    # JSON's strict mode takes a list for a tuple and a string for an enum or a path, but no "3" for a number.
    text = json.dumps(value, default=str)
    return _resolve_paths(_validate(lambda read: adapter.validate_json(read, strict=True), text, value, name), folder)


def parse_toml(text: str, *, name: str) -> Any:
    """Parse one value in TOML's syntax; an `InvalidInputError` begins with `name`."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{name} must be written as in TOML, got {text!r}: {error}") from None


_HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(?i:^token|(?:^|[_.-])(?:api[_-]?keys?|(?:access|private|secret)[_-]?keys?|secret|passw(?:or)?d|passphrase|"
    r"credentials?|authorization|(?:access|api|auth|bearer|hf|hub|refresh)[_-]?token))$"
    r"|^[A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|PASS|CREDENTIALS)$"
)
"""Of a variable, a header or an argument whose value is a secret."""
_SECRETS = (
    re.compile(r"(^postgres(?:ql)?://[^:@\s]*:).+(?=@)"),
    re.compile(r"(://[^/\s:@]*:)[^/\s]+(?=@)"),
    re.compile(r"(?i)([?&][\w-]*(?:key|token|secret|password|signature|sig)=)[^&\s#]+"),
    re.compile(r"((?i:\bauthorization: *(?:\w+ )?)|\bBearer (?=[\w.~+/=-]{16}))\S+"),
    re.compile(r"()\b(?:sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{12,}"),
)
"""Secrets in a text, after what stays: a URL's password or parameters, a header's credentials, keys of known forms."""


def to_json(value: Any) -> Any:
    """Convert a value to what JSON can hold, so that equal values stay equal."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def redact(value: Any, name: str = "") -> Any:
    """A value of JSON without the secrets in it: what names or forms say is one. The rest stays, to be compared."""
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [redact(item, name) for item in value]
    if not isinstance(value, str) or not value:
        return value
    if _SECRET_NAME.search(name):
        return _HIDDEN
    for pattern in _SECRETS:
        value = pattern.sub(rf"\g<1>{_HIDDEN}", value)
    return value


def format_value(value: Any) -> str:
    """Write a value as the command line takes it."""
    converted = to_json(value)
    if isinstance(converted, str):
        return converted or '""'
    return "none" if converted is None else _format_toml(converted)


def format_type(hint: Any) -> str:
    """Write a type as the help shows it: `INT`, `{grpo,rloo}`, `[TEXT,...]`."""
    members = [member for member in typing.get_args(hint) if member is not types.NoneType]
    if isinstance(hint, types.UnionType):
        return "|".join(format_type(member) for member in members)
    if typing.get_origin(hint) is tuple:
        return f"[{','.join('...' if member is ... else format_type(member) for member in members)}]"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"{{{','.join(str(member.value) for member in hint)}}}"
    if dataclasses.is_dataclass(hint):
        return f"{{{','.join(field.name for field in dataclasses.fields(hint))}}}"
    return {
        int: "INT",
        float: "FLOAT",
        bool: "BOOL",
        str: "TEXT",
        Path: "PATH",
        FunctionName: "NAME",
        CommandWord: "TEXT",
        ModelName: "TEXT",
    }.get(hint, "TOML")


def _format_toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_format_toml, value))}]"
    if isinstance(value, dict):
        names = {name: name if name.isidentifier() else json.dumps(name) for name in value}
        given = {name: item for name, item in value.items() if item is not None}  # TOML has no word for none
        return f"{{{', '.join(f'{names[name]} = {_format_toml(item)}' for name, item in given.items())}}}"
    return json.dumps(value)


def _adapter(hint: Any, name: str) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint)
    except PydanticSchemaGenerationError:
        raise InvalidInputError(f"{name} cannot be set: a value of the type {hint} cannot be written") from None


def _validate(validate: Callable[[str], Any], text: str, value: Any, name: str) -> Any:
    try:
        return validate(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        message = first["msg"].partition(", unable to")[0]
        rule = message.removeprefix("Input should ") if message.startswith("Input should ") else f"be valid: {message}"
        raise InvalidInputError(f"{name}{place} must {rule}, got {value!r}") from None


def _resolve_paths(value: Any, folder: Path | None) -> Any:
    if folder is None:
        return value
    if isinstance(value, Path):
        return folder / value
    if isinstance(value, FunctionName):
        return value.relative_to(folder)
    return tuple(_resolve_paths(item, folder) for item in value) if isinstance(value, tuple) else value
