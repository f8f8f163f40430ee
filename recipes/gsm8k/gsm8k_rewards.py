"""Rewards for gsm8k, whose column `answer` ends with a line such as `#### 72`."""

from __future__ import annotations

import re

_ANSWER = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")


def correct(completions: list[str], answer: list[str]) -> list[float]:
    """1 if the last number after #### is the answer's."""
    return [float(read_answer(text) == read_answer(right)) for text, right in zip(completions, answer, strict=True)]


def has_answer(completions: list[str]) -> list[float]:
    """1 for any number after ####: a reward that can rise before answers are right."""
    return [float(read_answer(text) is not None) for text in completions]


def read_answer(text: str) -> float | None:
    """The last number after ####; None without one."""
    found = _ANSWER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
