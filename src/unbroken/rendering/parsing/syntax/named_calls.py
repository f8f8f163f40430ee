"""Reads calls whose name is separate from their JSON arguments: `add<sep>{"a": 1}`."""

from __future__ import annotations

from typing import Any

from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt
from unbroken.rendering.parsing.syntax.json_calls import read_json


def read_named_call(
    name: str, arguments: str, *, call_id: str = "", span: tuple[int, int] | None = None
) -> CallAttempt:
    """Read a call from its name and the JSON text of its arguments. An empty text means no arguments."""
    try:
        value: Any = read_json(arguments) if arguments.strip() else {}
    except ValueError:
        return CallAttempt(status=ToolCallStatus.INVALID_JSON, span=span)
    if not name:
        return CallAttempt(status=ToolCallStatus.MISSING_NAME, span=span)
    if not isinstance(value, dict):
        return CallAttempt(status=ToolCallStatus.INVALID_ARGUMENTS, span=span)
    return CallAttempt(status=ToolCallStatus.OK, name=name, arguments=value, call_id=call_id, span=span)
