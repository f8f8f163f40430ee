"""Copy messages, so that environments and tools cannot change what a rollout recorded."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def copy_containers(value: T) -> T:
    """Copy the lists and dictionaries in `value`, at any depth; everything else, such as images, is shared.

    `copy.deepcopy` copies images, and fails on arguments nested deeper than Python's stack.
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
