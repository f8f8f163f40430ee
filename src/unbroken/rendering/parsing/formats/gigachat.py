r"""GigaChat 3: one JSON object up to the end of the turn, behind a control token in 3.1, behind a second header in 3.0.

3.1  Let me see.<|function_call|>{"name": "add", "arguments": {"a": 1}}<|message_sep|>
3.0  Let me see.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "add", "arguments": {"a": 1}}<|message_sep|>
                                                              `------------ one call --------------´
"""

from __future__ import annotations

from unbroken.rendering.base import PartKind
from unbroken.rendering.parsing.call_format import CallFormat, Region, reasoning_region
from unbroken.rendering.parsing.syntax.json_calls import make_json_call_reader

_END = "<|message_sep|>"


def _make_format(name: str, opening: str) -> CallFormat:
    call = Region(
        kind=PartKind.TOOL_CALL, opening=opening, ended_by=(opening, _END), read_calls=make_json_call_reader()
    )
    return CallFormat(name=name, regions=(reasoning_region(), call), message_separators=(_END,), hints=(opening,))


GIGACHAT = _make_format("gigachat", "<|function_call|>")
GIGACHAT3 = _make_format("gigachat3", "function call<|role_sep|>\n")
