r"""Llama 4: JSON calls, which follow a text between two control tokens, or are the whole turn.

<|python_start|>Let me see.<|python_end|>{"name": "add", "parameters": {"a": 1}}{"name": "now", "parameters": {}}<|eot|>
                `-content-´              `------------- one call --------------´`----------- another ----------´

Python lists of calls, which other templates for these models ask for, are the format `pythonic`.
"""

from __future__ import annotations

from unbroken.rendering.base import PartKind
from unbroken.rendering.parsing.call_format import CallFormat, Region
from unbroken.rendering.parsing.formats.llama3 import read_untagged
from unbroken.rendering.parsing.syntax.json_calls import make_json_calls_reader

_START, _END, _EOM = "<|python_start|>", "<|python_end|>", "<|eom|>"

LLAMA4 = CallFormat(
    name="llama4",
    regions=(
        Region(
            kind=PartKind.TOOL_CALL,
            opening=_END,
            ended_by=(_START, _END, _EOM),
            read_calls=make_json_calls_reader(arguments_keys=("parameters", "arguments")),
        ),
        Region(kind=PartKind.TOOL_CALL, starts_with="{", ended_by=(_START, _END, _EOM), read_calls=read_untagged),
    ),
    separators=(_START, _EOM),
    hints=("<|header_start|>", "<|eot|>"),
)
