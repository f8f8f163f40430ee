"""Delimiters in sampled ids: by id where the tokenizer has them as control tokens, by text where it has not.

By id, a delimiter that the model merely spells with ordinary tokens is text and no delimiter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from unbroken.rendering.control import AddedTokens


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
        ids = {delimiter: control.id_of(delimiter) for delimiter in delimiters}
        self.by_id = {token_id: delimiter for delimiter, token_id in ids.items() if token_id is not None}
        self._spelled = sorted((d for d, token_id in ids.items() if token_id is None), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._spelled)) or r"(?!)")
        self._heads = frozenset(d[:k] for d in self._spelled for k in range(1, len(d)))
        self._first = re.compile("|".join(sorted({re.escape(d[0]) for d in self._spelled})) or r"(?!)")
        self._longest = max(map(len, self._spelled), default=0)

    def find(self, text: str, *, is_all: bool) -> tuple[re.Match[str] | None, int]:
        """The first spelled delimiter in `text`, and how many characters before or without it are no part of any.

        Unless the text is all there is, characters at its end that may become (part of) a delimiter do not count.
        """
        match = self._pattern.search(text)
        if match is not None:
            if not is_all and text[match.start() :] in self._heads:
                return None, match.start()
            return match, match.start()
        if is_all:
            return None, len(text)
        for candidate in self._first.finditer(text, max(len(text) - self._longest + 1, 0)):
            if text[candidate.start() :] in self._heads:
                return None, candidate.start()
        return None, len(text)


class DelimiterScanner:
    """Cuts the text of one completion at its delimiters, as it comes."""

    def __init__(self, delimiters: Delimiters) -> None:
        self._delimiters = delimiters
        self._held = ""
        self._position = 0

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""
        self._held += text
        return self._cut(is_all=False)

    def feed_delimiter(self, delimiter: str) -> list[Piece]:
        """A delimiter that came as a control id: no spelled one crosses it."""
        return [*self.flush(), self._piece(delimiter, is_delimiter=True)]

    def flush(self) -> list[Piece]:
        """The pieces that were held back, now that nothing continues them."""
        return self._cut(is_all=True)

    def _cut(self, *, is_all: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._held:
            match, num_free = self._delimiters.find(self._held, is_all=is_all)
            if num_free:
                pieces.append(self._piece(self._held[:num_free]))
            if match is None:
                self._held = self._held[num_free:]
                break
            pieces.append(self._piece(match.group(), is_delimiter=True))
            self._held = self._held[match.end() :]
        return pieces

    def _piece(self, text: str, *, is_delimiter: bool = False) -> Piece:
        piece = Piece(text, self._position, is_delimiter)
        self._position += len(text)
        return piece
