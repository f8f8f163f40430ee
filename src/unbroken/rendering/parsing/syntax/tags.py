"""Reads bodies of tags, which the reader of completions has found (`Body.inner_delimiters`)."""

from __future__ import annotations

import re
from collections.abc import Collection

from unbroken.rendering.parsing.call_format import Body, InnerDelimiter

_NOT_BLANK = re.compile(r"\S")
_NAME = re.compile(r"""[^\s<>{}()\[\]"'=]+""")


class TagSyntaxError(ValueError):
    """The body does not follow its format. Never leaves this package."""


class TagReader:
    """Reads a body from left to right."""

    def __init__(self, body: Body) -> None:
        self._text = body.text
        self._delimiters = body.inner_delimiters
        self._next = 0
        self.position = 0

    def skip_blank(self) -> None:
        """Skip white space."""
        match = _NOT_BLANK.search(self._text, self.position)
        self.position = match.start() if match else len(self._text)

    def is_at(self, delimiter: str) -> bool:
        """Whether this delimiter comes next, after white space."""
        self.skip_blank()
        return self.is_just_at(delimiter)

    def is_just_at(self, delimiter: str) -> bool:
        """Whether this delimiter comes next, without white space before it."""
        found = self._find_delimiter(self.position)
        return found is not None and found.delimiter == delimiter and found.start == self.position

    def is_at_end(self) -> bool:
        """Whether only white space is left."""
        self.skip_blank()
        return self.position == len(self._text)

    def expect(self, delimiter: str) -> None:
        """Skip white space and this delimiter. Raises `TagSyntaxError` if something else comes."""
        if not self.is_at(delimiter):
            raise TagSyntaxError(f"expected {delimiter!r} at character {self.position}")
        self.position += len(delimiter)

    def read_until(self, delimiter: str) -> str:
        """Read up to this delimiter, and skip it; others are text. Raises `TagSyntaxError` if it does not come."""
        start = self.position
        while (found := self._find_delimiter(self.position)) is not None:
            self.position = found.stop
            if found.delimiter == delimiter:
                return self._text[start : found.start]
        raise TagSyntaxError(f"expected {delimiter!r} after character {self.position}")

    def read_until_before(self, delimiter: str, following: Collection[str]) -> str:
        """Like `read_until`, up to the first such delimiter that the end, or one of `following`, comes after.

        Others are text: values are not escaped, and may contain the tag that ends them.
        """
        start = self.position
        while True:
            self.read_until(delimiter)
            stop = self.position - len(delimiter)
            if self.is_at_end() or any(map(self.is_at, following)):
                return self._text[start:stop]

    def read_until_text(self, end: str) -> str:
        """Read up to the text `end`, not a delimiter, and skip it. Raises `TagSyntaxError` if it does not come."""
        stop = self._text.find(end, self.position)
        if stop < 0:
            raise TagSyntaxError(f"expected {end!r} after character {self.position}")
        text = self._text[self.position : stop]
        self.position = stop + len(end)
        return text

    def read_key(self, end: str, known: Collection[str]) -> str:
        """Read a key up to `end`, which a newline should follow. A key with `end` in it must be one of the known ones.

        Raises `TagSyntaxError` if it is not: the rest could also be the value.
        """
        start, tag = self.position, self._find_delimiter(self.position)
        key, stop = self.read_until_text(end), self._text.find(f"{end}\n", start, None if tag is None else tag.start)
        longer = self._text[start : max(stop, start)]
        if len(longer) <= len(key) or "\n" in longer or (key in known and longer not in known):
            return key
        if longer not in known:
            raise TagSyntaxError(f"{longer!r} may be a key, or a key and a part of its value")
        self.position = stop + len(end)
        return longer

    def read_until_next(self) -> str:
        """Read up to the next delimiter of any kind, or to the end."""
        found = self._find_delimiter(self.position)
        start, self.position = self.position, len(self._text) if found is None else found.start
        return self._text[start : self.position]

    def _find_delimiter(self, position: int) -> InnerDelimiter | None:
        """The first delimiter that begins at this character or later. Positions must not fall from call to call."""
        while self._next < len(self._delimiters) and self._delimiters[self._next].start < position:
            self._next += 1
        return self._delimiters[self._next] if self._next < len(self._delimiters) else None


def is_name(text: str) -> bool:
    """Whether a text can be a function's name, in formats where white space and brackets end a name."""
    return _NAME.fullmatch(text) is not None
