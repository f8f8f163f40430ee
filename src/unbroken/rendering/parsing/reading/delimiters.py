"""Finds delimiters in sampled ids: by id if they are control tokens of the tokenizer, by text if not.

A delimiter that is found by id is ordinary text where the model spells it with other ids. So is one with a control
token in it, such as `<|close|>call<|sep|>`, if the model spells that token.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from unbroken.rendering.encoding.control_tokens import AddedTokens


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a completion, or one delimiter."""

    text: str
    start: int
    """The number of characters before it in the completion."""
    is_delimiter: bool = False


class Delimiters:
    """A fixed set of delimiters, for one tokenizer."""

    def __init__(self, delimiters: Iterable[str], *, control: AddedTokens) -> None:
        ids = {delimiter: control.get_id(delimiter) for delimiter in delimiters}
        self.by_id = {token_id: delimiter for delimiter, token_id in ids.items() if token_id is not None}
        self._spelled = sorted((d for d, token_id in ids.items() if token_id is None), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._spelled)) or r"(?!)")
        self._heads = frozenset(d[:k] for d in self._spelled for k in range(1, len(d)))
        self._first = re.compile("|".join(sorted({re.escape(d[0]) for d in self._spelled})) or r"(?!)")
        self._longest = max(map(len, self._spelled), default=0)
        self._controls = {d: [(m.start, m.stop) for m in control.find(d)] for d in self._spelled}
        self.control_ids = control.ids if any(self._controls.values()) else frozenset()
        """The ids whose places `find` has to know."""

    def find(self, text: str, start: int, stop: int, is_control: Callable[[int, int], bool]) -> tuple[str, int] | None:
        """Find the first delimiter in `text[start:]` that begins before `stop`; the longest of several at one place.

        `is_control` says whether a control id has one of the characters in a range of the text.
        """
        while (match := self._pattern.search(text, start)) is not None and match.start() < stop:
            delimiter, start = match.group(), match.start()
            if all(is_control(start + a, start + b) for a, b in self._controls[delimiter]):
                return delimiter, start
            start += 1
        return None

    def count_certain(self, text: str) -> int:
        """Count the characters before a possible beginning of a delimiter at the end of `text`."""
        for candidate in self._first.finditer(text, max(len(text) - self._longest + 1, 0)):
            if text[candidate.start() :] in self._heads:
                return candidate.start()
        return len(text)


class DelimiterScanner:
    """Cuts the text of one completion at its delimiters, as it comes."""

    def __init__(self, delimiters: Delimiters) -> None:
        self._delimiters = delimiters
        self._held = ""
        self._position = 0
        self._control_starts: list[int] = []
        self._control_stops: list[int] = []

    def add_control(self, start: int, stop: int) -> None:
        """Note that a control id has these characters of the completion, before its text is fed."""
        self._control_starts.append(start)
        self._control_stops.append(stop)

    def feed(self, text: str) -> list[Piece]:
        """Take more text and return the pieces that are certain now."""
        self._held += text
        return self._cut(is_all=False)

    def feed_delimiter(self, delimiter: str) -> list[Piece]:
        """Take a delimiter that is a control id; none that is found by text extends across it."""
        return [*self.flush(), self._make_piece(delimiter, is_delimiter=True)]

    def flush(self) -> list[Piece]:
        """Return the held-back pieces: nothing continues them."""
        return self._cut(is_all=True)

    def _cut(self, *, is_all: bool) -> list[Piece]:
        text = self._held
        stop = len(text) if is_all else self._delimiters.count_certain(text)
        pieces: list[Piece] = []
        position = 0
        base = self._position
        while position < stop:
            found = self._delimiters.find(text, position, stop, lambda a, b: self._has_control(base + a, base + b))
            end = stop if found is None else found[1]
            if end > position:
                pieces.append(self._make_piece(text[position:end]))
            if found is None:
                position = end
                break
            pieces.append(self._make_piece(found[0], is_delimiter=True))
            position = end + len(found[0])
        self._held = text[position:]
        num_passed = bisect_right(self._control_stops, self._position)
        del self._control_starts[:num_passed], self._control_stops[:num_passed]
        return pieces

    def _has_control(self, start: int, stop: int) -> bool:
        k = bisect_right(self._control_stops, start)
        return k < len(self._control_starts) and self._control_starts[k] < stop

    def _make_piece(self, text: str, *, is_delimiter: bool = False) -> Piece:
        piece = Piece(text, self._position, is_delimiter)
        self._position += len(text)
        return piece
