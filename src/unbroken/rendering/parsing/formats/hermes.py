r"""Hermes and Qwen: `<think>` reasoning and `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

<think>\nadd them\n</think>\n\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>
       `-- reasoning --´        `- content -´  `------------------ one call, its span --------------------------´

A call is unclosed if another one opens inside it.
"""

from __future__ import annotations

from unbroken.rendering.parsing.call_format import CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.json_calls import make_json_call_reader

HERMES = CallFormat(
    name="hermes",
    regions=(reasoning_region(), call_region("<tool_call>", "</tool_call>", make_json_call_reader())),
    hints=("<tool_call>", "</tool_call>"),
)
