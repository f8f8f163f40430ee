r"""JSON calls between delimiters, in lists or alone: Nemotron, Phi-4, Granite 3, xLAM and InternLM.

NEMOTRON  Let me see.<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}, {"name": "now", ...}]</TOOLCALL>
          `-content-´           `------------- one call -------------´  `---- another ----´
PHI       <|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|><|end|>
          functools[{"name": "add", "arguments": {"a": 1}}, {...}]<|end|>
GRANITE   <|tool_call|>[{"name": "add", "arguments": {"a": 1}}, {...}]<|end_of_text|>
          <|tool_call|> {"name": "add", "arguments": {"a": 1}}\n<|tool_call|> {...}<|end_of_text|>
XLAM      [{"name": "add", "arguments": {"a": 1}}, {...}]<|eot_id|>                         the whole turn
INTERNLM  <|action_start|><|plugin|>\n{"name": "add", "arguments": {"a": 1}}<|action_end|>
          `-------------------------------- one call ----------------------------------´

Version 3 of Nemotron writes Qwen3-Coder's format, and version 4 of Granite that of Hermes. Granite 3.1 writes
`<tool_call>` as ordinary text. A turn of xLAM that begins with a bracket but has no call in its list is content. Code
for InternLM's interpreter, which `<|interpreter|>` begins, is not JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import (
    CallAttempt,
    CallBody,
    CallFormat,
    Region,
    call_region,
    reasoning_region,
)
from unbroken.rendering.parsing.syntax.json_calls import make_json_call_reader, make_json_calls_reader

_read_calls = make_json_calls_reader()


def _read_functools(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    """The delimiter includes the list's opening bracket."""
    return _read_calls(replace(body, text=body.text.rstrip().removesuffix("]")), tools)


_STARTS_LIST = re.compile(r'\s*\[\s*\{\s*"name"\s*:')


def _read_turn(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    attempts = _read_calls(body, tools)
    is_call = any(attempt.status is ToolCallStatus.OK for attempt in attempts) or _STARTS_LIST.match(body.text)
    return attempts if is_call else ()


_PLUGIN, _INTERPRETER = "<|plugin|>", "<|interpreter|>"
_read_call = make_json_call_reader(arguments_keys=("arguments", "parameters"))


def _read_action(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    (_, before), *others = body.split()
    if before.strip() or [delimiter for delimiter, _ in others] != [_PLUGIN]:
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]
    return _read_call(replace(body, text=others[0][1], inner_delimiters=()), tools)


NEMOTRON = CallFormat(
    name="nemotron",
    regions=(reasoning_region(), call_region("<TOOLCALL>", "</TOOLCALL>", _read_calls)),
    hints=("<TOOLCALL>",),
)
PHI = CallFormat(
    name="phi",
    regions=(
        reasoning_region(),
        call_region("<|tool_call|>", "<|/tool_call|>", _read_calls),
        Region(kind=PartKind.TOOL_CALL, opening="functools[", read_calls=_read_functools),
    ),
    hints=("<|user|>", "<|assistant|>", "<|end|>"),
)
_GRANITE_OPENINGS = ("<|tool_call|>", "<tool_call>")
GRANITE = CallFormat(
    name="granite",
    regions=(
        reasoning_region(),
        *(
            Region(kind=PartKind.TOOL_CALL, opening=opening, ended_by=_GRANITE_OPENINGS, read_calls=_read_calls)
            for opening in _GRANITE_OPENINGS
        ),
    ),
    hints=("<|start_of_role|>", "<|tool_call|>"),
)
XLAM = CallFormat(
    name="xlam",
    regions=(Region(kind=PartKind.TOOL_CALL, starts_with="[", read_calls=_read_turn),),
    hints=("a single JSON array",),
)
INTERNLM = CallFormat(
    name="internlm",
    regions=(
        reasoning_region(),
        call_region("<|action_start|>", "<|action_end|>", _read_action, inner_delimiters=(_PLUGIN, _INTERPRETER)),
    ),
    hints=("<|action_start|>", _PLUGIN),
)
