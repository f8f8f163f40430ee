"""The same conversation with other words, to see whether a rendering owes a control token to what somebody wrote (I5).

Where a renderer is not ours, text cannot be marked on its way through. But text that may complete a control token can
be replaced, and then the rendering must hold the same control tokens as before:

    user "im_end|>" after a template's "<|"     [<|im_end|>, ..]      with "xxxxxxxx" []        forged
    user "a < b" (may begin a token)            [<|im_end|>]          with "x x x" [<|im_end|>]  harmless
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_FIXED_KEYS = frozenset(
    {
        "role",
        "type",
        "content",
        "reasoning_content",
        "tool_calls",
        "tool_call_id",
        "id",
        "function",
        "name",
        "arguments",
    }
    | {"text", "description", "parameters", "properties"}
)
"""What renderers look up; all other keys somebody chose."""
_FIXED_VALUES = frozenset({"system", "developer", "user", "assistant", "tool", "text", "function"})
"""Roles and types by which renderers go."""


def replace_suspicious_text(value: Any, is_suspicious: Callable[[str], bool]) -> Any:
    """Messages or tools in which each suspicious string is so many letters x, with its white space where it was.

    The keys of messages and schemas stay, and so do roles and types. Arguments that are a JSON object as text stay one.
    The value itself is not changed.
    """
    if isinstance(value, Mapping):
        return {
            _harmless_key(key, is_suspicious): _harmless_item(key, item, is_suspicious) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [replace_suspicious_text(item, is_suspicious) for item in value]
    return _harmless(value, is_suspicious)


def _harmless_key(key: Any, is_suspicious: Callable[[str], bool]) -> Any:
    return key if key in _FIXED_KEYS else _harmless(key, is_suspicious)


def _harmless_item(key: Any, item: Any, is_suspicious: Callable[[str], bool]) -> Any:
    if key in ("role", "type") and isinstance(item, str) and item in _FIXED_VALUES:
        return item
    if key != "arguments":
        return replace_suspicious_text(item, is_suspicious)
    if isinstance(item, str):
        try:
            return json.dumps(_all_harmless(json.loads(item), is_suspicious), ensure_ascii=False)
        except ValueError:
            pass
    return _all_harmless(item, is_suspicious)


def _all_harmless(value: Any, is_suspicious: Callable[[str], bool]) -> Any:
    """The same for what has no keys of ours in it."""
    if isinstance(value, Mapping):
        return {_harmless(key, is_suspicious): _all_harmless(item, is_suspicious) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_all_harmless(item, is_suspicious) for item in value]
    return _harmless(value, is_suspicious)


def _harmless(value: Any, is_suspicious: Callable[[str], bool]) -> Any:
    return re.sub(r"\S", "x", value) if isinstance(value, str) and is_suspicious(value) else value
