r"""The Hermes form, also Qwen's: `<think>` reasoning and `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

<think>\nadd them\n</think>\n\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>
       `-- reasoning --´        `- content -´  `------------------ one call, its span --------------------------´

A call in which another one opens is unclosed.
"""

from __future__ import annotations

from unbroken.rendering.base import PartKind
from unbroken.rendering.parsing.format import Format, Region, thinking
from unbroken.rendering.parsing.syntax.json_calls import json_call_reader

HERMES = Format(
    name="hermes",
    regions=(
        thinking(),
        Region(
            kind=PartKind.TOOL_CALL,
            opening="<tool_call>",
            closings=("</tool_call>",),
            ended_by=("<tool_call>",),
            read=json_call_reader(),
        ),
    ),
    signs=(r'<tool_call>\s*\{\s*"name":\s*"probe_one"',),
    hints=("<tool_call>", "</tool_call>"),
)
