"""Reads calls that are JSON objects, or a name with a JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallReader
from unbroken.untrusted import check_json

_BLANK = " \t\r\n"
_VALUE_START = re.compile(r"[^ \t\r\n,;]")


def read_json(text: str) -> Any:
    """Read a JSON value that can be written again (`check_writable`). Raises `ValueError`."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        check_writable(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def check_writable(value: Any) -> None:
    """Raise `ValueError` unless clients can read the value and send it back.

    It has no NaN, `1e999`, integer of more than 308 digits or half a surrogate pair, and is not nested too deeply. A
    session whose model repeated a digit until its turn was cut was refused from then on: its own call came back.
    """
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    check_json(value)


def find_json_values(text: str, start: int = 0) -> Iterator[tuple[Any, tuple[int, int]]]:
    """Find the JSON values in `text[start:]`, separated by `,`, `;` or white space, with their characters.

    They end with the text, or before a closing bracket. Raises `ValueError` like `read_json`.
    """
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    position = _find_next_value(text, start)
    while position < len(text) and text[position] != "]":
        try:
            value, stop = decoder.raw_decode(text, position)
            check_writable(value)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        yield value, (position, stop)
        position = _find_next_value(text, stop)


def read_call_object(
    value: Any,
    *,
    name_keys: Sequence[str] = ("name",),
    arguments_keys: Sequence[str] = ("arguments",),
    id_keys: Sequence[str] = ("id",),
    span: tuple[int, int] | None = None,
) -> CallAttempt:
    """Read a JSON value as a call; the first key of each group that it has counts. See `read_named_call`."""
    call = value if isinstance(value, dict) else {}
    name, call_id = _get_first(call, name_keys), _get_first(call, id_keys)
    arguments = _get_first(call, arguments_keys)
    others = call.keys() - {*name_keys, *arguments_keys, *id_keys, "type"}
    if others and not any(key in call for key in arguments_keys) and isinstance(name, str) and name:
        # `{"name": "add", "parameters": {"a": 1}}` where the key is `arguments`: not a call of add without arguments.
        return CallAttempt(status=ToolCallStatus.INVALID_ARGUMENTS, name=name, span=span)
    return read_named_call(
        name if isinstance(name, str) else "",
        arguments,
        call_id=call_id if isinstance(call_id, str) else "",
        span=span,
    )


def make_json_call_reader(
    *,
    name_keys: Sequence[str] = ("name",),
    arguments_keys: Sequence[str] = ("arguments",),
    id_keys: Sequence[str] = ("id",),
) -> CallReader:
    """Make a reader of bodies that are one call: `{"name": "add", "arguments": {"a": 1}}`."""

    def read(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
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
    read_object: Callable[[Any, tuple[int, int]], CallAttempt] | None = None,
) -> CallReader:
    """Make a reader of bodies with several calls: a list, or objects one after the other (on lines, or with `;`).

    `read_object` reads a JSON value with its span, in place of the keys. Each call has its own span. If one is not
    JSON, the rest of the body is one attempt; so is a list without its end.
    """

    def read_by_keys(value: Any, span: tuple[int, int]) -> CallAttempt:
        return read_call_object(value, name_keys=name_keys, arguments_keys=arguments_keys, id_keys=id_keys, span=span)

    read_value = read_object or read_by_keys

    def read(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
        attempts: list[CallAttempt] = []
        text = body.text
        is_list = text.lstrip(_BLANK).startswith("[")
        position = text.index("[") + 1 if is_list else 0
        try:
            for value, span in find_json_values(text, position):
                attempts.append(read_value(value, span))
                position = span[1]
            position = _find_next_value(text, position)
            is_whole = not is_list or text[position:].startswith("]")
            position += is_list
        except ValueError:
            is_whole = not is_list or text.rstrip(_BLANK).endswith("]")
        if not is_whole:
            return [CallAttempt(status=ToolCallStatus.INVALID_JSON)]
        rest = (_find_next_value(text, position), len(text.rstrip(_BLANK)))
        if rest[0] < rest[1]:
            attempts.append(CallAttempt(status=ToolCallStatus.INVALID_JSON, span=rest))
        return attempts

    return read


def _find_next_value(text: str, position: int) -> int:
    match = _VALUE_START.search(text, position)
    return match.start() if match else len(text)


def _get_first(call: dict[str, Any], keys: Sequence[str]) -> Any:
    return next((call[key] for key in keys if key in call), None)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def read_named_call(
    name: str, arguments: Any, *, call_id: str = "", span: tuple[int, int] | None = None
) -> CallAttempt:
    r"""Read a call from its name and its arguments: the one rule of all formats that write them as JSON.

        {"a": 1}, '{"a": 1}', '"{\\"a\\": 1}"'      {"a": 1}: an object, or its text, also as a JSON string
        None, "", "null"                            {}: no arguments
        [1], 3                                      `INVALID_ARGUMENTS`
        "oops"                                      `INVALID_JSON`

    Granite 4 writes the text of an object, and many models leave out the arguments of a tool that takes none.
    """
    try:
        value = _decode_arguments(_decode_arguments(arguments))
    except ValueError:
        return CallAttempt(status=ToolCallStatus.INVALID_JSON, name=name, span=span)
    if not name:
        return CallAttempt(status=ToolCallStatus.MISSING_NAME, span=span)
    if not isinstance(value, dict):
        return CallAttempt(status=ToolCallStatus.INVALID_ARGUMENTS, name=name, span=span)
    return CallAttempt(status=ToolCallStatus.OK, name=name, arguments=value, call_id=call_id, span=span)


def _decode_arguments(arguments: Any) -> Any:
    """Decode arguments that are text. Raises `ValueError` if it is not JSON."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    return read_json(arguments) if isinstance(arguments, str) else arguments
