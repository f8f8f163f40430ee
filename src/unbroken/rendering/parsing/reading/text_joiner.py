"""Joins the pieces of a turn's answer, or of its reasoning, and trims them beside delimiters.

White space beside a delimiter only separates parts, and pieces of text with something between them are joined by a
newline. At the beginning and at the end of the turn nothing is trimmed.
"""

from __future__ import annotations


class TextJoiner:
    """Joins the pieces of one kind of text. White space is held back until something follows it."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._held: list[str] = []
        self._is_cut = False
        self._is_exact = False

    @property
    def text(self) -> str:
        """The text that is certain."""
        return "".join(self._texts)

    @property
    def is_empty(self) -> bool:
        """Whether there is no text yet."""
        return not self._texts

    @property
    def num_held(self) -> int:
        """The number of characters of white space that are held back."""
        return sum(map(len, self._held))

    def add(self, text: str) -> tuple[str, int]:
        """Add text; returns the text that is certain now, and the number of characters trimmed at the beginning."""
        num_trimmed = 0
        joint = ""
        if self._is_cut:
            kept = text if self._is_exact else text.lstrip()
            num_trimmed = len(text) - len(kept)
            if not kept:
                return "", num_trimmed
            self._is_cut = False
            joint = "\n" if self._texts else ""
            text = kept
        body = text if self._is_exact else text.rstrip()
        if not body:
            self._held.append(joint + text)
            return "", num_trimmed
        certain = joint + "".join(self._held) + body
        self._held = [text[len(body) :]] if len(body) < len(text) else []
        self._texts.append(certain)
        return certain, num_trimmed

    def cut(self, *, keeps_white_space: bool = False) -> None:
        """Drop the white space around a delimiter, but not that after it if `keeps_white_space`."""
        self._held = []
        self._is_cut = True
        self._is_exact = keeps_white_space

    def end(self) -> str:
        """End the text; returns what was held back."""
        held = "".join(self._held)
        self._held = []
        if held:
            self._texts.append(held)
        return held
