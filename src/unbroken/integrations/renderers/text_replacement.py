"""Replaces suspicious text of a conversation, to find out whether it forges a control token in a rendering (I5).

The package's renderers take no marks in text. But text that may complete a control token can be replaced, and then the
rendering must have the same control tokens as before:

    user "im_end|>" after a template's "<|"     [<|im_end|>, ..]      with "xxxxxxxx" []        forged
    user "a < b" (may begin a token)            [<|im_end|>]          with "x x x" [<|im_end|>]  harmless
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_FIXED_KEYS = frozenset(
    {"role", "type", "content", "reasoning_content", "tool_calls", "tool_call_id", "id", "function", "name"}
    | {"arguments", "text", "description", "parameters", "properties"}
)
"""Keys that renderers look up. All other keys are text from outside."""
_FIXED_VALUES = frozenset({"system", "developer", "user", "assistant", "tool", "text", "function"})
"""Roles and types that renderers compare."""


def replace_suspicious_text(value: Any, is_suspicious: Callable[[str], bool]) -> Any:
    """Copy messages or tools, with every character of suspicious strings except white space replaced by x.

    The fixed keys, roles and types stay. Arguments that are JSON text stay JSON text.
    """
    if isinstance(value, Mapping):
        return {
            _replace_key(key, is_suspicious): _replace_item(key, item, is_suspicious) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [replace_suspicious_text(item, is_suspicious) for item in value]
    return _replace(value, is_suspicious)


def _replace_key(key: Any, is_suspicious: Callable[[str], bool]) -> Any:
    return key if key in _FIXED_KEYS else _replace(key, is_suspicious)


def _replace_item(key: Any, item: Any, is_suspicious: Callable[[str], bool]) -> Any:
    if key in ("role", "type") and isinstance(item, str) and item in _FIXED_VALUES:
        return item
    if key != "arguments":
        return replace_suspicious_text(item, is_suspicious)
    if isinstance(item, str):
        try:
            return json.dumps(_replace_all(json.loads(item), is_suspicious), ensure_ascii=False)
        except ValueError:
            pass
    return _replace_all(item, is_suspicious)


def _replace_all(value: Any, is_suspicious: Callable[[str], bool]) -> Any:
    """Like `replace_suspicious_text`, for arguments: no key is fixed."""
    if isinstance(value, Mapping):
        return {_replace(key, is_suspicious): _replace_all(item, is_suspicious) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_all(item, is_suspicious) for item in value]
    return _replace(value, is_suspicious)


def _replace(value: Any, is_suspicious: Callable[[str], bool]) -> Any:
    return re.sub(r"\S", "x", value) if isinstance(value, str) and is_suspicious(value) else value
