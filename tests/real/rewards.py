"""The reward of the task that the real model learns."""

from __future__ import annotations


def one_word(completions: list[str], answer: list[str]) -> list[float]:
    """1 for the right word alone, with or without a full stop."""
    return [float(text.strip().lower().rstrip(".") == right) for text, right in zip(completions, answer, strict=True)]
