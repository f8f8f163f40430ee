r"""Apertus: a JSON list of objects with one key each, the name of the function.

<|inner_prefix|>add them<|inner_suffix|>Let me see.<|tools_prefix|>[{"add": {"a": 1}}, {"now": {}}]<|tools_suffix|>
                                                                    `--- one call --´
"""

from __future__ import annotations

from typing import Any

from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.json_calls import make_json_calls_reader, read_named_call


def _read_object(value: Any, span: tuple[int, int]) -> CallAttempt:
    if not isinstance(value, dict) or len(value) != 1 or "" in value:
        return CallAttempt(status=ToolCallStatus.MISSING_NAME, span=span)
    ((name, arguments),) = value.items()
    return read_named_call(name, arguments, span=span)


APERTUS = CallFormat(
    name="apertus",
    regions=(
        reasoning_region("<|inner_prefix|>", "<|inner_suffix|>"),
        call_region("<|tools_prefix|>", "<|tools_suffix|>", make_json_calls_reader(read_object=_read_object)),
    ),
    hints=("<|tools_prefix|>",),
)
