"""Delimiters in sampled ids: by id where the tokenizer has them as control tokens, by text where it has not.

By id, a delimiter that the model merely spells with ordinary tokens is text and no delimiter.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unbroken.rendering.control import AddedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """One delimiter: which, and where it stands in the ids and in their text (half-open)."""

    delimiter: str
    ids: tuple[int, int]
    chars: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedText:
    """The text of some ids with the delimiters in it, in order."""

    text: str
    markers: tuple[Marker, ...]


class MarkerScanner:
    """Finds a fixed set of delimiters."""

    def __init__(
        self, delimiters: Sequence[str], *, control: AddedTokens, decode: Callable[[Sequence[int]], str]
    ) -> None:
        ids = {delimiter: control.id_of(delimiter) for delimiter in delimiters}
        self._by_id = {token_id: delimiter for delimiter, token_id in ids.items() if token_id is not None}
        spelled = sorted((d for d, token_id in ids.items() if token_id is None), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, spelled)) or r"(?!)")
        self._decode = decode

    def scan(self, ids: Sequence[int]) -> MarkedText:
        """Decode `ids` and find the delimiters."""
        markers: list[Marker] = []
        text = ""
        start = 0
        control_positions = [k for k, token_id in enumerate(ids) if token_id in self._by_id]
        for position in [*control_positions, len(ids)]:
            segment = ids[start:position]
            segment_text = self._decode(segment)
            markers += self._find_spelled(segment, segment_text, first_id=start, first_char=len(text))
            text += segment_text
            if position < len(ids):
                delimiter = self._by_id[ids[position]]
                chars = (len(text), len(text) + len(delimiter))
                markers.append(Marker(delimiter=delimiter, ids=(position, position + 1), chars=chars))
                text += delimiter
            start = position + 1
        return MarkedText(text=text, markers=tuple(markers))

    def _find_spelled(self, ids: Sequence[int], text: str, *, first_id: int, first_char: int) -> list[Marker]:
        found: list[Marker] = []
        for match in self._spelled.finditer(text):
            start, stop = match.span()
            # The text of a prefix grows with the prefix, so its length can be searched by bisection.
            num_ids_before = bisect_right(range(len(ids) + 1), start, key=lambda k: len(self._decode(ids[:k]))) - 1
            num_ids_within = bisect_left(range(len(ids) + 1), stop, key=lambda k: len(self._decode(ids[:k])))
            found.append(
                Marker(
                    delimiter=match.group(),
                    ids=(first_id + num_ids_before, first_id + num_ids_within),
                    chars=(first_char + start, first_char + stop),
                )
            )
        return found
