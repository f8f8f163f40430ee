"""Turns sampled ids into pieces of text and delimiters, as they come.

It holds back part of a character, text that may become a delimiter, and ids that may end the turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from unbroken.rendering.encoding.control_tokens import AddedTokens
from unbroken.rendering.parsing.reading.decoding import IncrementalDecoder, TokenTexts
from unbroken.rendering.parsing.reading.delimiters import Delimiters, DelimiterScanner, Piece
from unbroken.rendering.parsing.reading.parts import PartBuilder


class CompletionTokens:
    """The tokens of a model's completions: control tokens, the text of each id, and the ids that end a turn."""

    def __init__(
        self,
        control: AddedTokens,
        decode: Callable[[Sequence[int]], str],
        *,
        stop_token_ids: Collection[int] = (),
        num_stop_ids: int = 1,
    ) -> None:
        """`stop_token_ids` are the ids that end a turn, at most `num_stop_ids` of them in a row."""
        self.control = control
        self.texts = TokenTexts(decode)
        self.stops = {token_id: control.get_text(token_id) or "" for token_id in stop_token_ids}
        self.num_stop_ids = num_stop_ids


class IdStream:
    """The ids of one completion. Before it returns the text of an id, it gives `parts` the beginning of that text."""

    def __init__(self, tokens: CompletionTokens, delimiters: Delimiters) -> None:
        self.length = 0
        """The number of characters so far, held-back ones too."""
        self.parts = PartBuilder()
        self._delimiters = delimiters
        self._decoder = IncrementalDecoder(tokens.texts)
        self._scanner = DelimiterScanner(delimiters)
        self._stops = tokens.stops
        self._num_stop_ids = tokens.num_stop_ids
        self._held_stops: deque[int] = deque()
        self._unscanned: list[str] = []

    @property
    def stop_texts(self) -> list[str]:
        """The texts of the last ids, if they end the turn."""
        return [self._stops[token_id] for token_id in self._held_stops]

    def feed(self, token_ids: Iterable[int]) -> Iterator[Piece]:
        """Take more ids and return the pieces that are certain now. Many ids at once cost less than one by one."""
        for token_id in map(int, token_ids):
            if token_id in self._stops:
                self._held_stops.append(token_id)
                if len(self._held_stops) > self._num_stop_ids:
                    yield from self._read(self._held_stops.popleft())
            else:
                while self._held_stops:
                    yield from self._read(self._held_stops.popleft())
                yield from self._read(token_id)
        yield from self._scan()

    def close(self) -> Iterator[Piece]:
        """Return the held-back pieces, without the ids that ended the turn."""
        self._add_texts(self._decoder.flush())
        yield from self._scan()
        yield from self._scanner.flush()

    def _read(self, token_id: int) -> Iterable[Piece]:
        delimiter = self._delimiters.by_id.get(token_id)
        if delimiter is None:
            texts = self._decoder.feed(token_id)
            self._add_texts(texts)
            if token_id in self._delimiters.control_ids:
                self._scanner.add_control(self.length - len(texts[-1]), self.length)
            return ()
        return self._read_delimiter(delimiter)

    def _read_delimiter(self, delimiter: str) -> Iterator[Piece]:
        self._add_texts(self._decoder.flush())
        yield from self._scan()
        self.parts.add_id(self.length)
        self.length += len(delimiter)
        yield from self._scanner.feed_delimiter(delimiter)

    def _add_texts(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.parts.add_id(self.length)
            self.length += len(text)
            self._unscanned.append(text)

    def _scan(self) -> Iterable[Piece]:
        if not self._unscanned:
            return ()
        text = "".join(self._unscanned)
        self._unscanned.clear()
        return self._scanner.feed(text)
