"""Which ids of a sequence are replaced in another one, and why.

There are two kinds of changes: the same text in other ids, and another text.

sampled ids ── decode, encode ──► plain ids ── parse, render, encode ──► retokenised ids
               (BPE splits)                    (everything else)
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from unbroken.rendering.base import PartKind
from unbroken.types.arrays import count_common_prefix

Decode = Callable[[Sequence[int]], str]
"""Turns ids into text, control tokens included."""

_WINDOW = 512
"""Ids of each sequence that are compared at a time, if that is enough."""
_RESUMED = 32
"""So many equal ids are a place where both sequences continue alike."""


class IdOrigin(StrEnum):
    """Where an id of a sequence is from."""

    PROMPT = "prompt"
    SAMPLED = "sampled"
    BRIDGE = "bridge"
    MESSAGE = "message"
    """The text of a tool or user message within a bridge."""


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


CAUSE_WORDS: Mapping[Cause, str] = {
    Cause.BPE_SPLIT: "the same text in other ids",
    Cause.RESERIALISED_CALL: "a call spelled in another way",
    Cause.STRIPPED_SPACE: "white space",
    Cause.DROPPED_REASONING: "reasoning left out or wrapped in another way",
    Cause.TURN_END: "another end of the turn",
    Cause.REWRITTEN: "a turn, or what is between two, written in another way",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The ids of `before` were replaced by those of `after`: half-open ranges, of which one may be empty."""

    before: tuple[int, int]
    after: tuple[int, int]

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether [start, stop) of the first sequence has ids of this gap. An empty range counts where it touches."""
        low, high = self.before
        if low == high or start == stop:
            return low <= stop and start <= high
        return max(low, start) < min(high, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alignment:
    """The gaps between two sequences, in order; everything else is equal."""

    gaps: tuple[Gap, ...]

    def locate(self, start: int, stop: int) -> tuple[int, int]:
        """The range of the first sequence where [start, stop) of the second one stands; of a gap, the whole."""
        low, high = self._locate(start, is_end=False), self._locate(stop, is_end=True)
        return min(low, high), max(low, high)

    def _locate(self, position: int, *, is_end: bool) -> int:
        shift = 0
        for gap in self.gaps:
            (low, high), (first, last) = gap.before, gap.after
            if position < first or (is_end and position == first):
                break
            if position < last or (is_end and position == last):
                return high if is_end else low
            shift = high - last
        return position + shift


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A stretch of ids that were replaced."""

    gap: Gap
    causes: frozenset[Cause]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSpan:
    """The ids [start, stop) of a sampled turn, and what each of them is part of."""

    start: int
    stop: int
    kinds: tuple[PartKind, ...]

    def touches(self, change: Change) -> bool:
        """Whether a change has ids of the turn, or puts some inside, directly before or directly after them."""
        return change.gap.overlaps(self.start, self.stop)


def find_changes(
    exact: Sequence[int],
    turns: Sequence[SampledSpan],
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

    def __init__(self, exact: Sequence[int], turns: Sequence[SampledSpan], reasoning_end: str) -> None:
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


def align(before: Sequence[int], after: Sequence[int]) -> _Alignment:
    """Align two sequences of ids.

    Worked example: `1 2 3 4` and `1 9 4 5` have two gaps: `2 3` became `9`, and after `4` nothing became `5`.
    """
    start = count_common_prefix(before, after)
    longest = min(len(before), len(after)) - start
    end = min(count_common_prefix(before[::-1], after[::-1]), longest)
    middle, other = before[start : len(before) - end], after[start : len(after) - end]
    return _Alignment(
        gaps=tuple(
            Gap(before=(start + i, start + j), after=(start + k, start + m)) for i, j, k, m in _find_gaps(middle, other)
        )
    )


def _find_gaps(left: Sequence[int], right: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """The ranges that differ. Windows are compared up to where both continue alike: all at once takes the square."""
    i, k, size = 0, 0, _WINDOW
    while i < len(left) or k < len(right):
        is_last = max(len(left) - i, len(right) - k) <= size
        matcher = difflib.SequenceMatcher(None, left[i : i + size], right[k : k + size], autojunk=False)
        codes = matcher.get_opcodes()
        long = (n for n, (kind, a, b, _, _) in enumerate(codes) if kind == "equal" and b - a >= _RESUMED)
        stop = len(codes) if is_last else next(long, None)
        if stop is None:
            size *= 2
            continue
        yield from ((i + a, i + b, k + c, k + d) for kind, a, b, c, d in codes[:stop] if kind != "equal")
        if is_last:
            return
        i, k, size = i + codes[stop][1], k + codes[stop][3], _WINDOW
        shared = count_common_prefix(left[i:], right[k:])
        i, k = i + shared, k + shared
