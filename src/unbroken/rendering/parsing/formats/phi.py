r"""Phi-4: a JSON list between control tokens, or after the word `functools`.

<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|><|end|>
functools[{"name": "add", "arguments": {"a": 1}}, {...}]<|end|>
          `-------------- one call ------------´
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind
from unbroken.rendering.parsing.call_format import (
    CallAttempt,
    CallBody,
    CallFormat,
    Region,
    call_region,
    reasoning_region,
)
from unbroken.rendering.parsing.syntax.json_calls import make_json_calls_reader

_read_calls = make_json_calls_reader()


def _read_functools(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    """The delimiter includes the list's opening bracket."""
    return _read_calls(replace(body, text=body.text.rstrip().removesuffix("]")), tools)


PHI = CallFormat(
    name="phi",
    regions=(
        reasoning_region(),
        call_region("<|tool_call|>", "<|/tool_call|>", _read_calls),
        Region(kind=PartKind.TOOL_CALL, opening="functools[", read_calls=_read_functools),
    ),
    hints=("<|user|>", "<|assistant|>", "<|end|>"),
)
