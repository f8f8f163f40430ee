"""OpenAI's rule for texts: they end before the stop string. Ids and logprobs keep all that was sampled."""

from __future__ import annotations

from collections.abc import Sequence


class StopCutter:
    """Passes on text as it comes, up to the first stop string.

    What may be the beginning of a stop string is held back until that is known: with the stop string `END`, the pieces
    `a E`, `N`, `x` come out as `a `, nothing, `ENx`.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self._ended = False

    def feed(self, text: str) -> str:
        """The text that is certain now."""
        if self._ended or not self._stop_strings:
            return "" if self._ended else text
        self._held += text
        found = [place for stop in self._stop_strings if (place := self._held.find(stop)) >= 0]
        if found:
            certain, self._held, self._ended = self._held[: min(found)], "", True
            return certain
        certain_length = len(self._held) - max(_overlap(self._held, stop) for stop in self._stop_strings)
        certain, self._held = self._held[:certain_length], self._held[certain_length:]
        return certain

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def cut(self, text: str) -> str:
        """A whole text, up to the first stop string."""
        return self.feed(text) + self.finish()


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with and goes beyond."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
