"""Rewards for sums. Each argument is a list with an entry for each completion of one prompt, and so is the result."""

from __future__ import annotations


def correct(completions: list[str], answer: list[str]) -> list[float]:
    """1 for exactly the answer, which is a column of the data set."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def digits(completions: list[str]) -> list[float]:
    """The share of digits among the characters: a reward that can rise before any answer is right."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]
