"""Cuts texts before the stop string, as OpenAI does. Ids and logprobs are not cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopCutter:
    """Passes text through, piece by piece, up to the first stop string.

    Text that may be the beginning of a stop string is held back until it is certain: with the stop string `END`, the
    pieces `a E`, `N`, `x` come out as `a `, nothing, `ENx`.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """Take a piece of text; returns the certain text."""
        if self.found is not None or not self._stop_strings:
            return "" if self.found is not None else text
        self._held += text
        found = [(place, stop) for stop in self._stop_strings if (place := self._held.find(stop)) >= 0]
        if found:
            place, self.found = min(found)
            certain, self._held = self._held[:place], ""
            return certain
        certain_length = len(self._held) - max(_find_overlap(self._held, stop) for stop in self._stop_strings)
        certain, self._held = self._held[:certain_length], self._held[certain_length:]
        return certain

    def finish(self) -> str:
        """Return the text held back, at the end."""
        held, self._held = self._held, ""
        return held

    def cut(self, text: str) -> str:
        """Cut a whole text before the first stop string."""
        return self.feed(text) + self.finish()


def _find_overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
