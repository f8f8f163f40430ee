r"""Nemotron before version 3: a JSON list between tags of ordinary text. Version 3 writes Qwen3-Coder's format.

<think>add them</think>Let me see.<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}, {"name": "now", ...}]</TOOLCALL>
                                             `------------- one call -----------´
"""

from __future__ import annotations

from unbroken.rendering.parsing.call_format import CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.json_calls import make_json_calls_reader

NEMOTRON = CallFormat(
    name="nemotron",
    regions=(reasoning_region(), call_region("<TOOLCALL>", "</TOOLCALL>", make_json_calls_reader())),
    hints=("<TOOLCALL>",),
)
