r"""Which part of the turn each sampled id belongs to.

An id belongs to the part in which its text begins, one without text of its own to what follows it, and a word with
white space before it that sets parts apart to the part of the word.

    ids      "Let"  " me"  " see."  "\n<"  "tool"  "_call>"  ...
    content  `-------------------´
    markup                          `---´                         it begins with white space between two parts
    call                                   `-------------- ...
"""

from __future__ import annotations

from collections import deque

from unbroken.rendering.base import PartKind, ResponsePart


class PartBuilder:
    """Turns borders between characters, told from left to right, into spans of ids."""

    def __init__(self) -> None:
        self._starts: deque[int] = deque()
        self._num_passed = 0
        self._begun: list[tuple[PartKind, int]] = []

    def add_id(self, start: int) -> None:
        """The next id, whose text begins at this character."""
        self._starts.append(start)

    def begin(self, kind: PartKind, start: int, *, since: int | None = None) -> int:
        """From this character on the text is of this kind; the next id that is in no earlier part.

        Where the text is of this kind already, nothing changes: white space at its end may still be taken from it.
        `since` is where the white space before that character begins: an id that begins in there, and holds the
        character, is in the part too.
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
        """All ids so far."""
        return self._num_passed + len(self._starts)

    def finish(self, *, num_stop: int) -> tuple[ResponsePart, ...]:
        """All parts, with the ids that ended the turn behind those that were added."""
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
