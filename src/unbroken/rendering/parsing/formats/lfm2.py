r"""LFM2 and LFM2.5: a Python list of calls between control tokens, or JSON if the system prompt asks for it.

<think>add</think>Let me see.<|tool_call_start|>[add(a=1, b="two"), now()]<|tool_call_end|><|im_end|>
       `-´         `-------´                     `--- one call --´  `---´
     reasoning      content                                        another
"""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.json_calls import make_json_calls_reader
from unbroken.rendering.parsing.syntax.python_calls import read_python_calls

_read_json_calls = make_json_calls_reader()


def _read(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    is_json = body.text.lstrip(" \t\r\n[").startswith("{")
    return _read_json_calls(body, tools) if is_json else read_python_calls(body, tools)


LFM2 = CallFormat(
    name="lfm2",
    regions=(reasoning_region(), call_region("<|tool_call_start|>", "<|tool_call_end|>", _read)),
    hints=("<|tool_list_start|>",),
)
