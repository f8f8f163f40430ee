"""Reads bodies that are made of tags, whose delimiters the reader of completions has found (`Body.marks`)."""

from __future__ import annotations

import re

from unbroken.rendering.parsing.call_format import Body, InnerDelimiter

_NOT_BLANK = re.compile(r"\S")
_NAME = re.compile(r"""[^\s<>{}()\[\]"'=]+""")


class TagSyntaxError(ValueError):
    """The body is not what its format says. Never leaves this package."""


class TagReader:
    """A body, read from left to right."""

    def __init__(self, body: Body) -> None:
        self._text = body.text
        self._marks = body.inner_delimiters
        self._next = 0
        self.position = 0
        """The character that is read next."""

    def skip_blank(self) -> None:
        """Pass white space."""
        match = _NOT_BLANK.search(self._text, self.position)
        self.position = match.start() if match else len(self._text)

    def is_at(self, delimiter: str) -> bool:
        """Whether this delimiter comes next, after white space."""
        self.skip_blank()
        mark = self._mark_from(self.position)
        return mark is not None and mark.delimiter == delimiter and mark.start == self.position

    def is_at_end(self) -> bool:
        """Whether nothing but white space is left."""
        self.skip_blank()
        return self.position == len(self._text)

    def expect(self, delimiter: str) -> None:
        """Pass white space and this delimiter.

        Raises:
            TagSyntaxError: something else comes.
        """
        if not self.is_at(delimiter):
            raise TagSyntaxError(f"expected {delimiter!r} at character {self.position}")
        self.position += len(delimiter)

    def read_until(self, delimiter: str) -> str:
        """The text up to the next such delimiter, which is passed. Others in between are text.

        Raises:
            TagSyntaxError: there is none.
        """
        start = self.position
        while (mark := self._mark_from(self.position)) is not None:
            self.position = mark.stop
            if mark.delimiter == delimiter:
                return self._text[start : mark.start]
        raise TagSyntaxError(f"expected {delimiter!r} behind character {self.position}")

    def read_until_text(self, end: str) -> str:
        """The text up to the next `end`, which is no delimiter, and is passed.

        Raises:
            TagSyntaxError: there is none.
        """
        stop = self._text.find(end, self.position)
        if stop < 0:
            raise TagSyntaxError(f"expected {end!r} behind character {self.position}")
        text = self._text[self.position : stop]
        self.position = stop + len(end)
        return text

    def read_until_next(self) -> str:
        """The text up to the next delimiter of any kind, which is not passed, or to the end."""
        mark = self._mark_from(self.position)
        start, self.position = self.position, len(self._text) if mark is None else mark.start
        return self._text[start : self.position]

    def _mark_from(self, position: int) -> InnerDelimiter | None:
        """The first delimiter that begins at this character or later. Positions only ever rise."""
        while self._next < len(self._marks) and self._marks[self._next].start < position:
            self._next += 1
        return self._marks[self._next] if self._next < len(self._marks) else None


def is_name(text: str) -> bool:
    """Whether a function may be named so, in formats that set names apart by white space and brackets."""
    return _NAME.fullmatch(text) is not None
