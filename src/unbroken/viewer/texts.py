"""Text from outside, for terminals and pages."""

from __future__ import annotations


def make_printable(text: str) -> str:
    """Put text from outside on one line, with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
