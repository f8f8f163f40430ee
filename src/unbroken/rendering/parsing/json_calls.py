"""Calls that are JSON objects: what is JSON here, and what of it is a call."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.format import Attempt, Body, ReadCalls

_NOT_BLANK = re.compile(r"[^ \t\r\n]")


def read_json(text: str) -> Any:
    """The value that `text` is, if it could be written as JSON again.

    Raises:
        ValueError: it is no JSON, or JSON that cannot be written again: NaN, `1e999`, half of a surrogate pair.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        _check_writable(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def find_json_values(text: str) -> Iterator[tuple[Any, tuple[int, int]]]:
    """The JSON values in `text`, one after the other with anything of `,;` and white space between, and where they are.

    Raises:
        ValueError: what comes next is no JSON, as in `read_json`.
    """
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    position = _next_value(text, 0)
    while position < len(text):
        try:
            value, stop = decoder.raw_decode(text, position)
            _check_writable(value)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        yield value, (position, stop)
        position = _next_value(text, stop)


def call_of(
    value: Any,
    *,
    name_keys: Sequence[str] = ("name",),
    arguments_keys: Sequence[str] = ("arguments",),
    id_keys: Sequence[str] = ("id",),
    span: tuple[int, int] | None = None,
) -> Attempt:
    """The call that a JSON value is; the first of the keys that it has counts."""
    call = value if isinstance(value, dict) else {}
    name = _first_of(call, name_keys)
    if not isinstance(name, str) or not name:
        return Attempt(status=ToolCallStatus.MISSING_NAME, span=span)
    arguments = _first_of(call, arguments_keys)
    if not isinstance(arguments, dict):
        return Attempt(status=ToolCallStatus.INVALID_ARGUMENTS, span=span)
    call_id = _first_of(call, id_keys)
    return Attempt(
        status=ToolCallStatus.OK,
        name=name,
        arguments=arguments,
        call_id=call_id if isinstance(call_id, str) else "",
        span=span,
    )


def json_call_reader(
    *,
    name_keys: Sequence[str] = ("name",),
    arguments_keys: Sequence[str] = ("arguments",),
    id_keys: Sequence[str] = ("id",),
) -> ReadCalls:
    """Reads a body that is one call: `{"name": "add", "arguments": {"a": 1}}`."""

    def read(body: Body, tools: Sequence[ToolSchema]) -> Sequence[Attempt]:
        try:
            value = read_json(body.text)
        except ValueError:
            return [Attempt(status=ToolCallStatus.INVALID_JSON)]
        return [call_of(value, name_keys=name_keys, arguments_keys=arguments_keys, id_keys=id_keys)]

    return read


def json_calls_reader(
    *,
    name_keys: Sequence[str] = ("name",),
    arguments_keys: Sequence[str] = ("arguments",),
    id_keys: Sequence[str] = ("id",),
) -> ReadCalls:
    """Reads a body of several calls: a list of them, or objects one after the other (lines, or with `;` between).

    Each has its own span. Where one is no JSON, all the rest is one attempt.
    """

    def read(body: Body, tools: Sequence[ToolSchema]) -> Sequence[Attempt]:
        attempts: list[Attempt] = []
        start, stop = _inside_brackets(body.text)
        position = start
        try:
            for value, (first, last) in find_json_values(body.text[start:stop]):
                span = (start + first, start + last)
                attempts.append(
                    call_of(value, name_keys=name_keys, arguments_keys=arguments_keys, id_keys=id_keys, span=span)
                )
                position = span[1]
        except ValueError:
            position += len(body.text[position:stop]) - len(body.text[position:stop].lstrip(" \t\r\n,;"))
            attempts.append(Attempt(status=ToolCallStatus.INVALID_JSON, span=(position, stop)))
        return attempts

    return read


def _inside_brackets(text: str) -> tuple[int, int]:
    """What a list's brackets enclose; all of it if there are none."""
    stripped = text.strip(" \t\r\n")
    if not (stripped.startswith("[") and stripped.endswith("]")) or stripped == "[":
        return 0, len(text)
    start = text.index("[") + 1
    return start, text.rindex("]")


def _next_value(text: str, position: int) -> int:
    while True:
        match = _NOT_BLANK.search(text, position)
        if match is None:
            return len(text)
        if match.group() not in ",;":
            return match.start()
        position = match.end()


def _first_of(call: dict[str, Any], keys: Sequence[str]) -> Any:
    return next((call[key] for key in keys if key in call), None)


def _check_writable(value: Any) -> None:
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
