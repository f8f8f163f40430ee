r"""Turns sampled ids into pieces of text and delimiters, as they come, and finds the part of the turn of each id.

It decodes each id once, at a cost that does not depend on the number of earlier ids. It holds back part of a character,
text that may become a delimiter, and ids that may end the turn.

A delimiter is found by id if it is a control token of the tokenizer, by text if not. One that is found by id is
ordinary text where the model spells it with other ids. So is one with a control token in it, such as
`<|close|>call<|sep|>`, if the model spells that token.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from unbroken.rendering.base import PartKind, ResponsePart
from unbroken.rendering.encoding.tokenizer import AddedTokens

_REPLACEMENT = "\ufffd"
_MAX_IDS_PER_CHARACTER = 4


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
        self.texts = _IdTexts(decode)
        self.stops = {token_id: control.get_text(token_id) or "" for token_id in stop_token_ids}
        self.num_stop_ids = num_stop_ids


class IdStream:
    """The ids of one completion. Before it returns the text of an id, it gives `parts` the beginning of that text."""

    def __init__(self, tokens: CompletionTokens, delimiters: Delimiters) -> None:
        self.length = 0
        """The number of characters so far, held-back ones too."""
        self.parts = PartBuilder()
        self._delimiters = delimiters
        self._decoder = _IncrementalDecoder(tokens.texts)
        self._scanner = _DelimiterScanner(delimiters)
        self._stops = tokens.stops
        self._num_stop_ids = tokens.num_stop_ids
        self._held_stops: deque[int] = deque()
        self._unscanned: list[str] = []

    @property
    def stop_texts(self) -> list[str]:
        """The texts of the last ids, if they end the turn."""
        return [self._stops[token_id] for token_id in self._held_stops]

    def feed(self, token_ids: Iterable[int]) -> Iterator[TextPiece]:
        """Take more ids and return the pieces that are certain now. Many ids at once cost less than one by one."""
        by_id, control_ids = self._delimiters.by_id, self._delimiters.control_ids
        for token_id in token_ids.tolist() if isinstance(token_ids, np.ndarray) else map(int, token_ids):
            if token_id in self._stops:
                self._held_stops.append(token_id)
                if len(self._held_stops) > self._num_stop_ids:
                    yield from self._read(self._held_stops.popleft())
                continue
            while self._held_stops:
                yield from self._read(self._held_stops.popleft())
            text = None if token_id in by_id or token_id in control_ids else self._decoder.find_whole(token_id)
            if text is None:
                yield from self._read(token_id)
            else:  # nearly all ids
                self._add_text(text)
        yield from self._scan()

    def close(self) -> Iterator[TextPiece]:
        """Return the held-back pieces, without the ids that ended the turn."""
        self._add_texts(self._decoder.flush())
        yield from self._scan()
        yield from self._scanner.flush()

    def _read(self, token_id: int) -> Iterable[TextPiece]:
        delimiter = self._delimiters.by_id.get(token_id)
        if delimiter is None:
            texts = self._decoder.feed(token_id)
            self._add_texts(texts)
            if token_id in self._delimiters.control_ids:
                self._scanner.add_control(self.length - len(texts[-1]), self.length)
            return ()
        return self._read_delimiter(delimiter)

    def _read_delimiter(self, delimiter: str) -> Iterator[TextPiece]:
        self._add_texts(self._decoder.flush())
        yield from self._scan()
        self.parts.add_id(self.length)
        self.length += len(delimiter)
        yield from self._scanner.feed_delimiter(delimiter)

    def _add_texts(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._add_text(text)

    def _add_text(self, text: str) -> None:
        self.parts.add_id(self.length)
        self.length += len(text)
        self._unscanned.append(text)

    def _scan(self) -> Iterable[TextPiece]:
        if not self._unscanned:
            return ()
        text = "".join(self._unscanned)
        self._unscanned.clear()
        return self._scanner.feed(text)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Some text of a completion, or one delimiter."""

    text: str
    start: int
    """The number of characters before it in the completion."""
    is_delimiter: bool = False

    @property
    def stop(self) -> int:
        """The number of characters up to its end."""
        return self.start + len(self.text)

    def is_one_of(self, delimiters: Container[str]) -> bool:
        """Whether it is one of these delimiters; text that only spells one is not."""
        return self.is_delimiter and self.text in delimiters


class Delimiters:
    """A fixed set of delimiters, for one tokenizer."""

    def __init__(self, delimiters: Iterable[str], *, control: AddedTokens) -> None:
        ids = {delimiter: control.get_id(delimiter) for delimiter in delimiters}
        self.by_id = {token_id: delimiter for delimiter, token_id in ids.items() if token_id is not None}
        self._spelled = sorted((d for d, token_id in ids.items() if token_id is None), key=len, reverse=True)
        self._pattern = _compile_any(self._spelled)
        self._heads = frozenset(d[:k] for d in self._spelled for k in range(1, len(d)))
        self._first = _compile_any(sorted({d[0] for d in self._spelled}))
        self._longest = max(map(len, self._spelled), default=0)
        self._controls = {d: [(m.start, m.stop) for m in control.find(d)] for d in self._spelled}
        self.control_ids = control.ids if any(self._controls.values()) else frozenset()
        """The ids whose places `find` has to know."""
        self.exact = frozenset(self.by_id.values()) | {d for d, matches in self._controls.items() if matches}
        """The delimiters that a control id belongs to, so that no other text can spell them."""

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


def _compile_any(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of the texts, the first of them first; it matches nothing if there are none."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


class _DelimiterScanner:
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

    def feed(self, text: str) -> list[TextPiece]:
        """Take more text and return the pieces that are certain now."""
        self._held += text
        return self._cut(is_all=False)

    def feed_delimiter(self, delimiter: str) -> list[TextPiece]:
        """Take a delimiter that is a control id; none that is found by text extends across it."""
        return [*self.flush(), self._make_piece(delimiter, is_delimiter=True)]

    def flush(self) -> list[TextPiece]:
        """Return the held-back pieces: nothing continues them."""
        return self._cut(is_all=True)

    def _cut(self, *, is_all: bool) -> list[TextPiece]:
        text = self._held
        stop = len(text) if is_all else self._delimiters.count_certain(text)
        pieces: list[TextPiece] = []
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

    def _make_piece(self, text: str, *, is_delimiter: bool = False) -> TextPiece:
        piece = TextPiece(text, self._position, is_delimiter)
        self._position += len(text)
        return piece


class _IdTexts:
    """The text of each id, decoded when it is first needed.

    An id has the same text everywhere, with two exceptions: a character may be spread over several ids, and some
    tokenizers drop the space before the first word of a text.

        ids of byte-level BPE   c3  a9  74          text by id   ""  "é"  "t"
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode = decode
        self._known: dict[int, tuple[str, str] | None] = {}

    def get(self, token_id: int, *, is_first: bool) -> str | None:
        """The text of an id; None if it has part of a character, so that its text depends on the ids around it."""
        if token_id not in self._known:
            self._known[token_id] = self._find(token_id)
        texts = self._known[token_id]
        return None if texts is None else texts[not is_first]

    def find_known(self, token_id: int) -> str | None:
        """The text of an id after another one; None if `get` did not find it before, or it has part of a character."""
        texts = self._known.get(token_id)
        return None if texts is None else texts[1]

    def _find(self, token_id: int) -> tuple[str, str] | None:
        """The text as the first id of a text, and after another id."""
        alone, twice = self.decode([token_id]), self.decode([token_id, token_id])
        if _REPLACEMENT in twice:
            return None
        return alone, twice[len(alone) :] if twice.startswith(alone) else alone


class _IncrementalDecoder:
    """Decodes one sequence of ids. Bytes that are not UTF-8 become U+FFFD once no later id can complete them."""

    def __init__(self, texts: _IdTexts) -> None:
        self._texts = texts
        self._is_first = True
        self._run: list[int] = []

    def find_whole(self, token_id: int) -> str | None:
        """The text of an id that has whole characters, behind others that have; None if `feed` must find it out."""
        if self._is_first or self._run:
            return None
        return self._texts.find_known(token_id)

    def feed(self, token_id: int) -> list[str]:
        """The texts of the ids that are certain now, in order; a character is with the last of its ids."""
        text = self._texts.get(token_id, is_first=self._is_first and not self._run)
        if text is not None:
            texts = self._take(len(self._run))
            self._is_first = False
            return [*texts, text]
        self._run.append(token_id)
        whole = self._texts.decode(self._run)
        if not whole.endswith(_REPLACEMENT):
            return self._take(len(self._run))
        if len(self._run) > _MAX_IDS_PER_CHARACTER:
            return self._take(self._first_border(whole))
        return []

    def flush(self) -> list[str]:
        """The texts of the held-back ids. The next id begins a new text."""
        texts = self._take(len(self._run))
        self._is_first = True
        return texts

    def _take(self, num_ids: int) -> list[str]:
        if num_ids == 0:
            return []
        run, self._run = self._run[:num_ids], self._run[num_ids:]
        self._is_first = False
        whole = self._texts.decode(run)
        starts = [0]
        for k in range(1, num_ids):
            before = self._texts.decode(run[:k])
            # If the last character of `before` differs in the whole text, this id continues it.
            start = len(before) if whole.startswith(before) else len(before) - 1
            starts.append(min(max(start, starts[-1]), len(whole)))
        return [whole[a:b] for a, b in zip(starts, [*starts[1:], len(whole)], strict=True)]

    def _first_border(self, whole: str) -> int:
        """The number of ids at the beginning that share no character with the others."""
        for k in range(1, len(self._run)):
            if self._texts.decode(self._run[:k]) + self._texts.decode(self._run[k:]) == whole:
                return k
        return len(self._run)


class PartBuilder:
    r"""Converts borders between characters, given from left to right, into spans of ids.

    An id belongs to the part in which its text begins, with two exceptions: an id without text belongs to the next
    part, and an id with a word after white space between parts belongs to the part of the word.

        ids      "Let"  " me"  " see."  "\n<"  "tool"  "_call>"  ...
        content  `-------------------´
        markup                          `---´                         it begins with white space between two parts
        call                                   `-------------- ...
    """

    def __init__(self) -> None:
        self._starts: deque[int] = deque()
        self._num_passed = 0
        self._begun: list[tuple[PartKind, int]] = []

    def add_id(self, start: int) -> None:
        """Add the next id, whose text begins at this character."""
        self._starts.append(start)

    def begin(self, kind: PartKind, start: int, *, since: int | None = None) -> int:
        """Begin a part at this character; returns the index of its first id.

        If the text is of this kind already, nothing changes: white space at its end may still become markup. `since` is
        the beginning of the white space before the character: an id that begins there and includes the character
        belongs to the part.
        """
        if self._continues(kind):
            return self._num_passed
        self._pass_ids(start, since)
        if self._begun and self._begun[-1][1] == self._num_passed:
            self._begun.pop()  # no id begins in that part
        if not self._continues(kind):
            self._begun.append((kind, self._num_passed))
        return self._num_passed

    def _continues(self, kind: PartKind) -> bool:
        """Whether the last part is of this kind and no call: two calls are two parts."""
        return kind is not PartKind.TOOL_CALL and bool(self._begun) and self._begun[-1][0] is kind

    def _pass_ids(self, start: int, since: int | None) -> None:
        """Pass the ids that belong to the part before `start`; `since` as in `begin`."""
        while self._starts and self._starts[0] < start:
            holds_start = len(self._starts) == 1 or self._starts[1] > start
            if since is not None and self._starts[0] >= since and holds_start:
                break
            self._starts.popleft()
            self._num_passed += 1

    @property
    def num_ids(self) -> int:
        """The number of ids so far."""
        return self._num_passed + len(self._starts)

    def finish(self, *, num_stop: int) -> tuple[ResponsePart, ...]:
        """Build all parts, with the ids that ended the turn after those that were added."""
        num_ids = self.num_ids
        borders = [start for _, start in self._begun[1:]] + [num_ids]
        parts = [
            ResponsePart(kind=kind, span=(start, stop))
            for (kind, start), stop in zip(self._begun, borders, strict=True)
            if start < stop
        ]
        if num_stop:
            parts.append(ResponsePart(kind=PartKind.STOP, span=(num_ids, num_ids + num_stop)))
        return tuple(parts)
