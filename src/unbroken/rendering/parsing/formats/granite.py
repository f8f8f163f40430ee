r"""Granite 3: a JSON list behind a token, or one object behind each, up to the end of the turn. Granite 4 is `hermes`.

Let me see.<|tool_call|>[{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]<|end_of_text|>
`-content-´              `------------- one call -------------´  `----------- another ----------´
<|tool_call|> {"name": "add", "arguments": {"a": 1}}\n<|tool_call|> {"name": "now", "arguments": {}}<|end_of_text|>

Version 3.1 writes `<tool_call>` as ordinary text.
"""

from __future__ import annotations

from unbroken.rendering.base import PartKind
from unbroken.rendering.parsing.call_format import CallFormat, Region, reasoning_region
from unbroken.rendering.parsing.syntax.json_calls import make_json_calls_reader

_OPENINGS = ("<|tool_call|>", "<tool_call>")
_read_calls = make_json_calls_reader()

GRANITE = CallFormat(
    name="granite",
    regions=(
        reasoning_region(),
        *(
            Region(kind=PartKind.TOOL_CALL, opening=opening, ended_by=_OPENINGS, read_calls=_read_calls)
            for opening in _OPENINGS
        ),
    ),
    hints=("<|start_of_role|>", "<|tool_call|>"),
)
