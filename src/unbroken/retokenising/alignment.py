"""Which ids of one sequence are still there, in order, in another one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

_WINDOW = 512
"""Ids of each sequence that are compared at a time, if that is enough."""
_RESUMED = 32
"""So many equal ids are a place where both sequences go on alike."""


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
class Alignment:
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


def align(before: Sequence[int], after: Sequence[int]) -> Alignment:
    """Align two sequences of ids.

    Worked example: `1 2 3 4` and `1 9 4 5` have two gaps: `2 3` became `9`, and after `4` nothing became `5`.
    """
    start = _count_shared(before, after)
    longest = min(len(before), len(after)) - start
    end = min(_count_shared(before[::-1], after[::-1]), longest)
    middle, other = before[start : len(before) - end], after[start : len(after) - end]
    return Alignment(
        gaps=tuple(
            Gap(before=(start + i, start + j), after=(start + k, start + m)) for i, j, k, m in _find_gaps(middle, other)
        )
    )


def _find_gaps(left: Sequence[int], right: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """The ranges that differ. Windows are compared up to where both go on alike: all at once takes the square."""
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
        shared = _count_shared(left[i:], right[k:])
        i, k = i + shared, k + shared


def _count_shared(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
