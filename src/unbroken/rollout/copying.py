"""Copies for others to keep and to change: what a rollout recorded stays as it was."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def copy_containers(value: T) -> T:
    """Copy the lists and dictionaries that `value` is made of, to any depth; share everything else, as images are.

    Not `copy.deepcopy`, which copies images and fails on what a model can nest deeper than Python's stack.
    """
    root: list[Any] = [value]
    copies: dict[int, Any] = {}
    pending: list[Any] = [root]
    while pending:
        parent = pending.pop()
        for key, child in list(parent.items() if isinstance(parent, dict) else enumerate(parent)):
            if isinstance(child, (dict, list)):
                if id(child) not in copies:
                    copies[id(child)] = child.copy()
                    pending.append(copies[id(child)])
                parent[key] = copies[id(child)]
    copy: T = root[0]
    return copy
