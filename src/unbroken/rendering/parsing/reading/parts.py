r"""Finds the part of the turn that each sampled id belongs to.

An id belongs to the part in which its text begins, with two exceptions: an id without text belongs to the next part,
and an id with a word after white space between parts belongs to the part of the word.

    ids      "Let"  " me"  " see."  "\n<"  "tool"  "_call>"  ...
    content  `-------------------´
    markup                          `---´                         it begins with white space between two parts
    call                                   `-------------- ...
"""

from __future__ import annotations

from collections import deque

from unbroken.rendering.base import PartKind, ResponsePart


class PartBuilder:
    """Converts borders between characters, given from left to right, into spans of ids."""

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
        if self._begun and self._begun[-1][0] is kind and kind is not PartKind.TOOL_CALL:
            return self._num_passed
        while self._starts and self._starts[0] < start:
            holds_start = len(self._starts) == 1 or self._starts[1] > start
            if since is not None and self._starts[0] >= since and holds_start:
                break
            self._starts.popleft()
            self._num_passed += 1
        if self._begun and self._begun[-1][1] == self._num_passed:
            self._begun.pop()  # no id begins in that part
        if kind is PartKind.TOOL_CALL or not self._begun or self._begun[-1][0] is not kind:
            self._begun.append((kind, self._num_passed))
        return self._num_passed

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
