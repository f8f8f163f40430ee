r"""Finds the messages' own text in a rendered prompt, by rendering the messages a second time with marks.

A mark is two private-use characters around a text; the first one encodes the message's index. If the second rendering
without its marks equals the first one, every mark is exact. A template that cuts, compares or rewrites text renders
something else: then there is no result.

    plain   <|im_start|>user\nhi<|im_end|>        marked  <|im_start|>user\n(0)hi(/)<|im_end|>      span [17, 19) of 0
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.messages import KNOWN_ROLES, ToolSchema, iterate_strings

_FIRST_OPENING = 0xF0000
_LAST_OPENING = 0x10FFFD
_CLOSING = "\ue000"
_MARK = re.compile(f"[{chr(_FIRST_OPENING)}-{chr(_LAST_OPENING)}{_CLOSING}]")

OUTSIDE_INDEX = _LAST_OPENING - _FIRST_OPENING
"""The index of text from outside that is not a message's content: tool schemas, names and ids."""

_FIXED_KEYS = frozenset({"id", "type", "function", "name", "description", "parameters", "arguments", "text"})
"""Keys of the OpenAI format, which templates look up: not text from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The characters [start, stop) of a rendered text, which are text of message `index`."""

    start: int
    stop: int
    index: int


def mark_messages(messages: Sequence[Mapping[str, Any]], is_suspicious: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Mark content, reasoning and call arguments. Names and ids, which templates compare, only if suspicious."""
    return [_mark_message(message, index, is_suspicious) for index, message in enumerate(messages)]


def mark_suspicious_strings(value: Any, is_suspicious: Callable[[str], bool]) -> Any:
    """Mark the suspicious strings inside a JSON-like value, with `OUTSIDE_INDEX`."""
    return _map_strings(
        value, lambda text: _mark(text, OUTSIDE_INDEX) if text not in _FIXED_KEYS and is_suspicious(text) else text
    )


def remove_marks(marked: str) -> tuple[str, list[Span]] | None:
    """The text without its marks, and the spans of marked text in it; None if the marks are not in pairs."""
    spans: list[Span] = []
    pieces: list[str] = []
    length = last = 0
    opened: tuple[int, int] | None = None
    for match in _MARK.finditer(marked):
        pieces.append(marked[last : match.start()])
        length += match.start() - last
        last = match.end()
        if (match.group() == _CLOSING) is (opened is None):
            return None
        if opened is None:
            opened = (length, ord(match.group()) - _FIRST_OPENING)
        else:
            spans.append(Span(start=opened[0], stop=length, index=opened[1]))
            opened = None
    pieces.append(marked[last:])
    return ("".join(pieces), spans) if opened is None else None


def strip_marks(marked: str) -> str:
    """The text without its marks, in pairs or not."""
    return _MARK.sub("", marked)


def find_outside_strings(messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema] = ()) -> Iterator[str]:
    """Find all strings of messages and tools that come from outside and may be marked."""
    values = [
        value
        for message in messages
        for key, value in _remove_types(message).items()
        if key != "role" or value not in KNOWN_ROLES
    ]
    yield from (text for text in iterate_strings([*values, *tools]) if text not in _FIXED_KEYS)


def _remove_types(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Remove the types of content parts, which are not text from outside."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [{k: v for k, v in part.items() if k != "type"} for part in content]}


def _mark_message(message: Mapping[str, Any], index: int, is_suspicious: Callable[[str], bool]) -> dict[str, Any]:
    return {key: _mark_value(key, value, index, is_suspicious) for key, value in message.items()}


def _mark_value(key: str, value: Any, index: int, is_suspicious: Callable[[str], bool]) -> Any:
    """The value of one key of a message, with marks around its texts."""
    if key == "content" and isinstance(value, list):
        return [_mark_part(part, index, is_suspicious) for part in value]
    if key == "content" or "reasoning" in key or "thinking" in key:
        return _map_strings(value, lambda text: _mark(text, index))
    if key == "tool_calls" and value:
        return [_mark_call(call, index, is_suspicious) for call in value]
    # Templates compare roles: a mark around one that they know would change what they write.
    return value if key == "role" and value in KNOWN_ROLES else mark_suspicious_strings(value, is_suspicious)


def _mark_call(call: Mapping[str, Any], index: int, is_suspicious: Callable[[str], bool]) -> dict[str, Any]:
    function = mark_suspicious_strings(dict(call["function"]), is_suspicious)
    function["arguments"] = _map_strings(call["function"].get("arguments"), lambda text: _mark(text, index))
    return {**mark_suspicious_strings(dict(call), is_suspicious), "function": function}


def _mark_part(part: Mapping[str, Any], index: int, is_suspicious: Callable[[str], bool]) -> dict[str, Any]:
    marked: dict[str, Any] = {**mark_suspicious_strings(dict(part), is_suspicious), "type": part["type"]}
    if isinstance(part.get("text"), str):
        marked["text"] = _mark(part["text"], index)
    return marked


def _mark(text: str, index: int) -> str:
    """Put marks around the text without its outer white space, so that templates that trim keep them."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    return f"{text[:start]}{chr(_FIRST_OPENING + index)}{core}{_CLOSING}{text[start + len(core) :]}"


class _Element(str):
    """A marked text in a list or an object. A template that writes the whole list as Python does writes the marks too.

    `repr` would escape them: `['one']` is written as `['(0)one(/)']`.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        opening, text = self.lstrip()[0], super().__repr__()
        before, _, rest = text.partition(repr(opening)[1:-1])
        core, _, after = rest.rpartition(repr(_CLOSING)[1:-1])
        return f"{before}{opening}{core}{_CLOSING}{after}"


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Change all strings of a value. Those that change in a list or an object become an `_Element`."""
    return change(value) if isinstance(value, str) else _map_elements(value, change)


def _map_elements(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        changed = change(value)
        return value if changed is value else _Element(changed)
    if isinstance(value, Mapping):
        return {_map_elements(key, change): _map_elements(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_elements(item, change) for item in value]
    return value
