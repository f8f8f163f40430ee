r"""InternLM 2 and 3: a JSON object between two tokens, behind one that says that it is for a tool.

Let me see.<|action_start|><|plugin|>\n{"name": "add", "arguments": {"a": 1}}<|action_end|><|im_end|>
`-content-´                 one call, its span: all from `<|action_start|>` to `<|action_end|>`

Code for the interpreter, which `<|interpreter|>` begins, is not JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.json_calls import make_json_call_reader

_PLUGIN, _INTERPRETER = "<|plugin|>", "<|interpreter|>"
_read_call = make_json_call_reader(arguments_keys=("arguments", "parameters"))


def _read(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    (_, before), *others = body.split()
    if before.strip() or [delimiter for delimiter, _ in others] != [_PLUGIN]:
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]
    return _read_call(replace(body, text=others[0][1], inner_delimiters=()), tools)


INTERNLM = CallFormat(
    name="internlm",
    regions=(
        reasoning_region(),
        call_region("<|action_start|>", "<|action_end|>", _read, inner_delimiters=(_PLUGIN, _INTERPRETER)),
    ),
    hints=("<|action_start|>", _PLUGIN),
)
