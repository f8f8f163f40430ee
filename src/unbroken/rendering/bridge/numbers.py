r"""Numbers in a bridge that count through the conversation (Cohere numbers its calls).

Two windows differ in nothing but the length of their prefixes, one with 0 and one with 3 calls in it:

    ..<|START_TOOL_RESULT|>[{"tool_call_id": "0", ..}, {"tool_call_id": "1", ..}]..
    ..<|START_TOOL_RESULT|>[{"tool_call_id": "3", ..}, {"tool_call_id": "4", ..}]..        offsets 0 and 1

After a history with 7 calls they are 7 and 8. A certificate checks that for every history of its panel.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedText:
    """A text with numbers: `pieces[0]`, the number count + `offsets[0]`, `pieces[1]`, and so on."""

    pieces: tuple[str, ...]
    offsets: tuple[int, ...]

    def write(self, count: int) -> str:
        """The text after a history with this count."""
        numbers = [str(count + offset) for offset in self.offsets]
        return "".join(part for pair in zip(self.pieces, [*numbers, ""], strict=True) for part in pair)

    def move(self, position: int, old_count: int, new_count: int) -> int:
        """The place in the text after the new count of a place in the text after the old one, outside the numbers."""
        moved, stop = position, 0
        for piece, offset in zip(self.pieces, self.offsets, strict=False):
            stop += len(piece) + len(str(old_count + offset))
            if stop > position:
                break
            moved += len(str(new_count + offset)) - len(str(old_count + offset))
        return moved


def find_numbers(text: str, count: int, other: str, other_count: int) -> NumberedText | None:
    """Find the numbers in which two texts differ; None if they differ in anything else."""
    pieces: list[str] = []
    offsets: list[int] = []
    start = other_start = 0
    while True:
        length = _count_common(text, start, other, other_start)
        if start + length == len(text) and other_start + length == len(other):
            return NumberedText(pieces=(*pieces, text[start:]), offsets=tuple(offsets))
        while length and text[start + length - 1].isdecimal():
            length -= 1
        number, other_number = _read_digits(text, start + length), _read_digits(other, other_start + length)
        if not number or not other_number or int(other_number) - int(number) != other_count - count:
            return None
        pieces.append(text[start : start + length])
        offsets.append(int(number) - count)
        start += length + len(number)
        other_start += length + len(other_number)


def _count_common(text: str, start: int, other: str, other_start: int) -> int:
    pairs = zip(text[start:], other[other_start:], strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(text) - start, len(other) - other_start))


def _read_digits(text: str, start: int) -> str:
    stop = start
    while stop < len(text) and stop - start < 12 and "0" <= text[stop] <= "9":
        stop += 1
    return text[start:stop]
