r"""Decodes sampled ids one after the other, at a cost that does not depend on the number of earlier ids.

An id has the same text everywhere, with two exceptions: a character may be spread over several ids, and some tokenizers
drop the space before the first word of a text.

    ids of byte-level BPE   c3  a9  74          text by id   ""  "é"  "t"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_MAX_IDS_PER_CHARACTER = 4


class TokenTexts:
    """The text of each id, decoded when it is first needed."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode = decode
        self._known: dict[int, tuple[str, str] | None] = {}

    def get(self, token_id: int, *, is_first: bool) -> str | None:
        """The text of an id; None if it has part of a character, so that its text depends on the ids around it."""
        if token_id not in self._known:
            self._known[token_id] = self._find(token_id)
        texts = self._known[token_id]
        return None if texts is None else texts[not is_first]

    def _find(self, token_id: int) -> tuple[str, str] | None:
        """The text as the first id of a text, and after another id."""
        alone, twice = self.decode([token_id]), self.decode([token_id, token_id])
        if _REPLACEMENT in twice:
            return None
        return alone, twice[len(alone) :] if twice.startswith(alone) else alone


class IncrementalDecoder:
    """Decodes one sequence of ids. Bytes that are not UTF-8 become U+FFFD once no later id can complete them."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._is_first = True
        self._run: list[int] = []

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
