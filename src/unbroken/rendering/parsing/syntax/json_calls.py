"""Calls that are JSON objects: what is JSON here, and what of it is a call."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import Body, CallAttempt, CallReader

_BLANK = " \t\r\n"
_NEITHER_BLANK_NOR_COMMA = re.compile(r"[^ \t\r\n,;]")


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


def find_json_values(text: str, start: int = 0) -> Iterator[tuple[Any, tuple[int, int]]]:
    """The JSON values in `text[start:]`, with anything of `,;` and white space between, and where they are.

    They end with the text, or before a closing bracket.

    Raises:
        ValueError: what comes next is no JSON, as in `read_json`.
    """
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    position = _next_value(text, start)
    while position < len(text) and text[position] != "]":
        try:
            value, stop = decoder.raw_decode(text, position)
            _check_writable(value)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        yield value, (position, stop)
        position = _next_value(text, stop)


def read_call_object(
    value: Any,
    *,
    name_keys: Sequence[str] = ("name",),
    arguments_keys: Sequence[str] = ("arguments",),
    id_keys: Sequence[str] = ("id",),
    span: tuple[int, int] | None = None,
) -> CallAttempt:
    """The call that a JSON value is; the first of the keys that it has counts."""
    call = value if isinstance(value, dict) else {}
    name = _first_of(call, name_keys)
    if not isinstance(name, str) or not name:
        return CallAttempt(status=ToolCallStatus.MISSING_NAME, span=span)
    arguments = _first_of(call, arguments_keys)
    if not isinstance(arguments, dict):
        return CallAttempt(status=ToolCallStatus.INVALID_ARGUMENTS, span=span)
    call_id = _first_of(call, id_keys)
    return CallAttempt(
        status=ToolCallStatus.OK,
        name=name,
        arguments=arguments,
        call_id=call_id if isinstance(call_id, str) else "",
        span=span,
    )


def make_json_call_reader(
    *,
    name_keys: Sequence[str] = ("name",),
    arguments_keys: Sequence[str] = ("arguments",),
    id_keys: Sequence[str] = ("id",),
) -> CallReader:
    """Reads a body that is one call: `{"name": "add", "arguments": {"a": 1}}`."""

    def read(body: Body, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
        try:
            value = read_json(body.text)
        except ValueError:
            return [CallAttempt(status=ToolCallStatus.INVALID_JSON)]
        return [read_call_object(value, name_keys=name_keys, arguments_keys=arguments_keys, id_keys=id_keys)]

    return read


def make_json_calls_reader(
    *,
    name_keys: Sequence[str] = ("name",),
    arguments_keys: Sequence[str] = ("arguments",),
    id_keys: Sequence[str] = ("id",),
) -> CallReader:
    """Reads a body of several calls: a list of them, or objects one after the other (lines, or with `;` between).

    Each has its own span. Where one is no JSON, all the rest is one attempt; a list without its end is one as a whole.
    """

    def read(body: Body, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
        attempts: list[CallAttempt] = []
        text = body.text
        is_list = text.lstrip(_BLANK).startswith("[")
        position = text.index("[") + 1 if is_list else 0
        try:
            for value, span in find_json_values(text, position):
                attempts.append(
                    read_call_object(
                        value, name_keys=name_keys, arguments_keys=arguments_keys, id_keys=id_keys, span=span
                    )
                )
                position = span[1]
            position = _next_value(text, position)
            is_whole = not is_list or text[position:].startswith("]")
            position += is_list
        except ValueError:
            is_whole = not is_list or text.rstrip(_BLANK).endswith("]")
        if not is_whole:
            return [CallAttempt(status=ToolCallStatus.INVALID_JSON)]
        rest = (_next_value(text, position), len(text.rstrip(_BLANK)))
        if rest[0] < rest[1]:
            attempts.append(CallAttempt(status=ToolCallStatus.INVALID_JSON, span=rest))
        return attempts

    return read


def _next_value(text: str, position: int) -> int:
    match = _NEITHER_BLANK_NOR_COMMA.search(text, position)
    return match.start() if match else len(text)


def _first_of(call: dict[str, Any], keys: Sequence[str]) -> Any:
    return next((call[key] for key in keys if key in call), None)


def _check_writable(value: Any) -> None:
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
