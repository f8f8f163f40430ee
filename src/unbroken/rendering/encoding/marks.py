r"""Finds the messages' own text in a rendered prompt, by rendering the messages a second time with marks.

A mark is two private-use characters around a text; the first one encodes the message's index. They are characters that
the first rendering does not have: terminals and web pages print icons that are such characters, too. If the second
rendering without its marks equals the first one, every mark is exact. A template that cuts, compares or rewrites text
renders something else: then there is no result. One that cuts a text at `</think>` may write a `</think>` of its own in
its place: a text that spells control tokens is marked once more, in pieces that are cut inside each of them.

    plain   <|im_start|>user\nhi<|im_end|>        marked  <|im_start|>user\n(0)hi(/)<|im_end|>      span [17, 19) of 0
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.errors import TemplateError
from unbroken.messages import KNOWN_ROLES, ToolSchema, iterate_strings

_CLOSINGS = range(0xE000, 0xF900)
_OPENINGS = range(0xF0000, 0x10FFFE)
_PRIVATE = re.compile(f"[{chr(_CLOSINGS[0])}-{chr(_CLOSINGS[-1])}{chr(_OPENINGS[0])}-{chr(_OPENINGS[-1])}]")

OUTSIDE_INDEX = len(_OPENINGS)
"""The index of text from outside that is not a message's content: tool schemas, names and ids."""

_FIXED_KEYS = frozenset({"id", "type", "function", "name", "description", "parameters", "arguments", "text"})
"""Keys of the OpenAI format, which templates look up: not text from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The characters [start, stop) of a rendered text, which are text of message `index`."""

    start: int
    stop: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Marks around the texts of some messages, as characters that a text does not have."""

    split: Callable[[str], list[str]] = lambda text: [text]
    """Cuts a content or reasoning into pieces, of which each is marked."""
    first: int
    """The character that opens a mark of `OUTSIDE_INDEX`; those of the messages follow."""
    number: int
    """How many of them there are."""
    closing: str

    @classmethod
    def absent_from(cls, text: str, messages: Sequence[Any]) -> Marks:
        """Marks for these messages, of characters that are not in `text`; some that are, if it has nearly all.

        Raises:
            TemplateError: there are more messages than such characters.
        """
        used = set() if text.isascii() else set(map(ord, _PRIVATE.findall(text)))
        number = 1 << max(6, len(messages).bit_length())
        if number > len(_OPENINGS) + 2:
            raise TemplateError(f"a conversation must have fewer than {2**17} messages, got {len(messages)}")
        blocks = (start for start in _OPENINGS[::number] if used.isdisjoint(range(start, start + number)))
        closing = next((code for code in _CLOSINGS if code not in used), _CLOSINGS[0])
        return cls(first=next(blocks, _OPENINGS[0]), number=number, closing=chr(closing))

    def mark_messages(
        self, messages: Sequence[Mapping[str, Any]], is_suspicious: Callable[[str], bool]
    ) -> list[dict[str, Any]]:
        """Mark content, reasoning and call arguments. Names and ids, which templates compare, only if suspicious."""
        return [self._mark_message(message, index, is_suspicious) for index, message in enumerate(messages)]

    def mark_suspicious_strings(self, value: Any, is_suspicious: Callable[[str], bool]) -> Any:
        """Mark the suspicious strings inside a JSON-like value, with `OUTSIDE_INDEX`."""
        return _map_strings(
            value,
            lambda text: self._mark(text, OUTSIDE_INDEX) if text not in _FIXED_KEYS and is_suspicious(text) else text,
        )

    def remove(self, marked: str) -> tuple[str, list[Span]] | None:
        """The text without its marks, and the spans of marked text in it; None if the marks are not in pairs."""
        spans: list[Span] = []
        pieces: list[str] = []
        length = last = 0
        opened: tuple[int, int] | None = None
        for match in self._pattern.finditer(marked):
            pieces.append(marked[last : match.start()])
            length += match.start() - last
            last = match.end()
            if (match.group() == self.closing) is (opened is None):
                return None
            if opened is None:
                offset = ord(match.group()) - self.first
                opened = (length, offset - 1 if offset else OUTSIDE_INDEX)
            else:
                spans.append(Span(start=opened[0], stop=length, index=opened[1]))
                opened = None
        pieces.append(marked[last:])
        return ("".join(pieces), spans) if opened is None else None

    def strip(self, marked: str) -> str:
        """The text without its marks, in pairs or not."""
        return self._pattern.sub("", marked)

    @property
    def _pattern(self) -> re.Pattern[str]:
        return _compile(self.first, self.number, self.closing)

    def _mark_message(
        self, message: Mapping[str, Any], index: int, is_suspicious: Callable[[str], bool]
    ) -> dict[str, Any]:
        return {key: self._mark_value(key, value, index, is_suspicious) for key, value in message.items()}

    def _mark_value(self, key: str, value: Any, index: int, is_suspicious: Callable[[str], bool]) -> Any:
        """The value of one key of a message, with marks around its texts."""
        if key == "content" and isinstance(value, list):
            return [self._mark_part(part, index, is_suspicious) for part in value]
        if key == "content" or "reasoning" in key or "thinking" in key:
            return _map_strings(value, lambda text: self._mark(text, index, self.split))
        if key == "tool_calls" and value:
            return [self._mark_call(call, index, is_suspicious) for call in value]
        # Templates compare roles: a mark around one that they know would change what they write.
        return value if key == "role" and value in KNOWN_ROLES else self.mark_suspicious_strings(value, is_suspicious)

    def _mark_call(self, call: Mapping[str, Any], index: int, is_suspicious: Callable[[str], bool]) -> dict[str, Any]:
        function = self.mark_suspicious_strings(dict(call["function"]), is_suspicious)
        function["arguments"] = _map_strings(call["function"].get("arguments"), lambda text: self._mark(text, index))
        return {**self.mark_suspicious_strings(dict(call), is_suspicious), "function": function}

    def _mark_part(self, part: Mapping[str, Any], index: int, is_suspicious: Callable[[str], bool]) -> dict[str, Any]:
        marked: dict[str, Any] = {**self.mark_suspicious_strings(dict(part), is_suspicious), "type": part["type"]}
        if isinstance(part.get("text"), str):
            marked["text"] = self._mark(part["text"], index, self.split)
        return marked

    def _mark(self, text: str, index: int, split: Callable[[str], list[str]] | None = None) -> str:
        """Put marks around the text without its outer white space, so that templates that trim keep them."""
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        opening = chr(self.first + (0 if index == OUTSIDE_INDEX else index + 1))
        marked = "".join(f"{opening}{piece}{self.closing}" for piece in ([core] if split is None else split(core)))
        return f"{text[:start]}{marked}{text[start + len(core) :]}"


@functools.lru_cache(maxsize=256)
def _compile(first: int, number: int, closing: str) -> re.Pattern[str]:
    return re.compile(f"[{chr(first)}-{chr(first + number - 1)}{closing}]")


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


class _Element(str):
    """A marked text in a list or an object. A template that writes the whole list as Python does writes the marks too.

    `repr` would escape them: `['one']` is written as `['(0)one(/)']`.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        core, text = self.strip(), super().__repr__()
        opening, closing = core[0], core[-1]
        before, _, rest = text.partition(repr(opening)[1:-1])
        inner, _, after = rest.rpartition(repr(closing)[1:-1])
        return f"{before}{opening}{inner}{closing}{after}"


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
