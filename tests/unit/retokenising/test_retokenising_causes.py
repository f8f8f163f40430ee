"""Why ids changed, over sequences and texts written by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from unbroken.rendering.base import PartKind
from unbroken.retokenising.changes import Cause, Change, Gap, SampledSpan, align, find_changes

TEXTS = {
    1: "<user>", 2: "hi", 3: "<bot>", 4: "pe", 5: "mi", 6: "pemi", 7: "<end>", 8: "{", 9: '"k":', 10: '"k": ', 11: "1}",
    12: "<think>", 13: "hm", 14: "</think>", 15: " ", 16: "<stop>", 17: "bye", 20: "x", 21: "yx", 22: "xy",
}  # fmt: skip
KINDS = {
    "R": PartKind.REASONING, "C": PartKind.CONTENT, "T": PartKind.TOOL_CALL, "M": PartKind.MARKUP, "S": PartKind.STOP,
}  # fmt: skip
BPE, CALL, SPACE, REASONING, END, REWRITTEN = Cause


def decode(ids: Sequence[int]) -> str:
    return "".join(TEXTS[i] for i in ids)


def make_turns(kinds: str) -> list[SampledSpan]:
    """The turns of `..CS.CS`, where dots are given."""
    turns, start = [], 0
    for run in kinds.split("."):
        if run:
            turns.append(SampledSpan(start=start, stop=start + len(run), kinds=tuple(KINDS[k] for k in run)))
        start += len(run) + 1
    return turns


def change(before: tuple[int, int], after: tuple[int, int], *causes: Cause) -> Change:
    return Change(gap=Gap(before=before, after=after), causes=frozenset(causes))


TABLE = {
    "nothing": ([1, 2, 3, 6, 7], "...CS", None, [1, 2, 3, 6, 7], []),
    "a word in two ids": ([3, 4, 5, 7], ".CCS", [3, 6, 7], [3, 6, 7], [change((1, 3), (1, 2), BPE)]),
    "letters across a match": (
        [3, 20, 21, 7], ".CCS", [3, 22, 20, 7], [3, 22, 20, 7],
        [change((1, 1), (1, 2), BPE), change((2, 3), (3, 3), BPE)],
    ),
    "compact json": ([3, 8, 9, 11, 7], ".TTTS", None, [3, 8, 10, 11, 7], [change((2, 3), (2, 3), CALL)]),
    "a space put into a call": ([3, 8, 11, 7], ".TTS", None, [3, 8, 15, 11, 7], [change((2, 2), (2, 3), CALL)]),
    "a call left out": ([3, 8, 9, 11, 7], ".TTTS", None, [3, 7], [change((1, 4), (1, 1), REWRITTEN)]),
    "a space stripped": ([3, 6, 15, 7], ".CCS", None, [3, 6, 7], [change((2, 3), (2, 2), SPACE)]),
    "reasoning": ([3, 12, 13, 14, 6, 7], ".MRMCS", None, [3, 6, 7], [change((1, 4), (1, 1), REASONING)]),
    "the wrapper of no reasoning": ([3, 12, 14, 6, 7], ".MMCS", None, [3, 6, 7], [change((1, 3), (1, 1), REASONING)]),
    "a cut turn": ([3, 6], ".C", None, [3, 6, 7], [change((2, 2), (2, 3), END)]),
    "another stop id": ([3, 6, 16], ".CS", None, [3, 6, 7], [change((2, 3), (2, 3), END)]),
    "a turn rewritten": ([3, 6, 7], ".CS", None, [3, 17, 7], [change((1, 2), (1, 2), REWRITTEN)]),
    "a second turn": (
        [3, 6, 7, 2, 3, 12, 13, 14, 6, 7], ".CS..MRMCS", None, [3, 6, 7, 2, 3, 6, 7],
        [change((5, 8), (5, 5), REASONING)],
    ),
    "two causes in two places": (
        [3, 4, 5, 8, 9, 11, 7], ".CCTTTS", [3, 6, 8, 9, 11, 7], [3, 6, 8, 10, 11, 7],
        [change((1, 3), (1, 2), BPE), change((4, 5), (3, 4), CALL)],
    ),
    "two causes in one place": (
        [3, 9, 4, 5, 7], ".TTTS", [3, 9, 6, 7], [3, 10, 6, 7], [change((1, 4), (1, 3), BPE, CALL)]
    ),
    "a detour that leads back": ([3, 4, 5, 7], ".CCS", [3, 6, 7], [3, 4, 5, 7], []),
}  # fmt: skip


@pytest.mark.parametrize(("exact", "kinds", "plain", "retokenised", "expected"), TABLE.values(), ids=TABLE)
def test_each_change_has_its_cause(
    exact: list[int], kinds: str, plain: list[int] | None, retokenised: list[int], expected: list[Change]
) -> None:
    found = find_changes(exact, make_turns(kinds), plain or exact, retokenised, decode=decode)
    assert list(found) == expected


def test_the_table_has_every_cause() -> None:
    assert {cause for row in TABLE.values() for each in row[4] for cause in each.causes} == set(Cause)


def test_an_alignment_has_the_gaps_only() -> None:
    assert align([1, 2, 3, 4], [1, 9, 4, 5]).gaps == (
        Gap(before=(1, 3), after=(1, 2)),
        Gap(before=(4, 4), after=(3, 4)),
    )
    assert align([], []).gaps == align([1, 1], [1, 1]).gaps == ()
    assert align([1, 1, 1], [1, 1]).gaps == (Gap(before=(2, 3), after=(2, 2)),)


@pytest.mark.parametrize(
    ("place", "expected"),
    [((0, 1), (0, 1)), ((1, 2), (1, 3)), ((2, 3), (3, 4)), ((1, 3), (1, 4)), ((3, 4), (4, 4)), ((0, 4), (0, 4))],
)
def test_a_place_is_found_in_the_first_sequence(place: tuple[int, int], expected: tuple[int, int]) -> None:
    assert align([1, 2, 3, 4], [1, 9, 4, 5]).locate(*place) == expected


def test_a_long_sequence_is_aligned_piece_by_piece() -> None:
    """All at once, this many ids take minutes."""
    rng = random.Random(0)
    before = [rng.randrange(50) for _ in range(12_000)]
    after = list(before)
    edits = [(11_000, 11_700, []), (9_000, 9_002, [99]), (5_000, 5_000, [98, 97]), (300, 301, [96])]
    for start, stop, new in edits:
        after[start:stop] = new
    gaps = align(before, after).gaps
    assert [gap.before for gap in gaps] == [edit[:2] for edit in reversed(edits)]
    rebuilt, position = [], 0
    for gap in gaps:
        rebuilt += before[position : gap.before[0]] + after[slice(*gap.after)]
        position = gap.before[1]
    assert rebuilt + before[position:] == after
