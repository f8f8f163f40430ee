r"""Nemotron before version 3: a JSON list between tags of ordinary text. Version 3 writes Qwen3-Coder's form.

<think>add them</think>Let me see.<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}, {"name": "now", ...}]</TOOLCALL>
                                             `------------- one call -----------´
"""

from __future__ import annotations

from unbroken.rendering.base import PartKind
from unbroken.rendering.parsing.format import Format, Region, thinking
from unbroken.rendering.parsing.syntax.json_calls import json_calls_reader

NEMOTRON = Format(
    name="nemotron",
    regions=(
        thinking(),
        Region(
            kind=PartKind.TOOL_CALL,
            opening="<TOOLCALL>",
            closings=("</TOOLCALL>",),
            ended_by=("<TOOLCALL>",),
            read=json_calls_reader(),
        ),
    ),
    signs=(r"<TOOLCALL>",),
    hints=("<TOOLCALL>",),
)
