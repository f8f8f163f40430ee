"""The task of the client scripts: a question that takes two calls of a tool, and where the script prints its answer."""

from __future__ import annotations

import json
import os
from typing import Any

QUESTION = os.environ.get("QUESTION", "What is 2 + 3 + 4?")
"""What is asked; the environment may ask for a longer sum."""
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
calls: list[list[int]] = []
"""The arguments of each call."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number
        b: the other
    """
    calls.append([a, b])
    return a + b


def report(version: str, answer: Any, **more: Any) -> None:
    """Print what the client made of the task, as the last line of the output."""
    print(json.dumps({"version": version, "answer": str(answer), "calls": calls, **more}))
