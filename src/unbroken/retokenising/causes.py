"""Why ids changed. There are two kinds: the same text in other ids, and another text.

sampled ids ── decode, encode ──► plain ids ── parse, render, encode ──► retokenised ids
               (BPE splits)                    (everything else)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from unbroken.rendering.base import PartKind
from unbroken.retokenising.alignment import Gap, align

Decode = Callable[[Sequence[int]], str]
"""Turns ids into text, control tokens included."""


class Cause(StrEnum):
    """Why ids differ. The names are in the JSON report and must stay stable."""

    BPE_SPLIT = "bpe_split"
    """The same text, in other ids than were sampled."""
    RESERIALISED_CALL = "reserialised_call"
    """The template spells the arguments of a call in its own way: other spaces, escapes or numbers."""
    STRIPPED_SPACE = "stripped_space"
    """Only white space differs, outside of calls."""
    DROPPED_REASONING = "dropped_reasoning"
    """Reasoning, or the empty wrapper of none, is left out or wrapped in another way."""
    TURN_END = "turn_end"
    """The turn ends with other ids: one was cut by length and gets an end, or another stop id was sampled."""
    REWRITTEN = "rewritten"
    """The template writes a turn, or what is between two of them, in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The sampled ids [start, stop), and what each of them is part of."""

    start: int
    stop: int
    kinds: tuple[PartKind, ...]

    def touches(self, gap: Gap) -> bool:
        """Whether the gap changes ids of the turn, or puts some inside, directly before or directly after them."""
        return gap.overlaps(self.start, self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A stretch of ids that were replaced."""

    gap: Gap
    causes: frozenset[Cause]


def find_changes(
    exact: Sequence[int],
    turns: Sequence[Turn],
    plain: Sequence[int],
    retokenised: Sequence[int],
    *,
    decode: Decode,
    reasoning_end: str = "</think>",
) -> tuple[Change, ...]:
    """Find all stretches of `exact` that `retokenised` lacks, in order, each with at least one cause.

    `plain` are the ids of the text of `exact`, tokenised again. No change is found if and only if the ids are equal.
    """
    direct = align(exact, retokenised).gaps
    if not direct:
        return ()
    respelled = align(exact, plain)
    rewriting = _Rewriting(exact, turns, reasoning_end)
    rewritten = []
    for gap in align(plain, retokenised).gaps:
        place = respelled.locate(*gap.before)
        old, new = decode(plain[slice(*gap.before)]), decode(retokenised[slice(*gap.after)])
        rewritten.append((place, rewriting.classify(place, old, new)))
    changes = []
    for gap in direct:
        causes = {cause for place, cause in rewritten if gap.overlaps(*place)}
        if any(other.overlaps(*gap.before) for other in respelled.gaps):
            causes.add(Cause.BPE_SPLIT)
        if not causes:
            old, new = decode(exact[slice(*gap.before)]), decode(retokenised[slice(*gap.after)])
            causes.add(Cause.BPE_SPLIT if old == new else rewriting.classify(gap.before, old, new))
        changes.append(Change(gap=gap, causes=frozenset(causes)))
    return tuple(changes)


class _Rewriting:
    """Says why a stretch of text was written in another way, from what its ids are part of."""

    def __init__(self, exact: Sequence[int], turns: Sequence[Turn], reasoning_end: str) -> None:
        self._kinds: list[PartKind | None] = [None] * len(exact)
        self._open_ends = set()
        """Where turns end without a stop id."""
        for turn in turns:
            self._kinds[turn.start : turn.stop] = turn.kinds
            if turn.kinds[-1] is not PartKind.STOP:
                self._open_ends.add(turn.stop)
        self._reasoning_end = reasoning_end.strip()

    def classify(self, place: tuple[int, int], old: str, new: str) -> Cause:
        """Why the text `old` of the ids [place[0], place[1]) became `new`."""
        start, stop = place
        kinds = set(self._kinds[start:stop])
        is_inside_call = start == stop and self._is_call(start - 1) and self._is_call(start)
        if is_inside_call or (PartKind.TOOL_CALL in kinds and not (self._has_whole_call(place) and not new.strip())):
            return Cause.RESERIALISED_CALL
        if _remove_space(old) == _remove_space(new):
            return Cause.STRIPPED_SPACE
        if PartKind.REASONING in kinds or (self._reasoning_end and self._reasoning_end in old):
            return Cause.DROPPED_REASONING
        if PartKind.STOP in kinds or (start == stop and start in self._open_ends):
            return Cause.TURN_END
        return Cause.REWRITTEN

    def _is_call(self, position: int) -> bool:
        return 0 <= position < len(self._kinds) and self._kinds[position] is PartKind.TOOL_CALL

    def _has_whole_call(self, place: tuple[int, int]) -> bool:
        start, stop = place
        begins = [i for i in range(start, stop) if self._is_call(i) and not self._is_call(i - 1)]
        return any(not self._is_call(i) for begin in begins for i in range(begin, stop + 1))


def _remove_space(text: str) -> str:
    return "".join(text.split())
