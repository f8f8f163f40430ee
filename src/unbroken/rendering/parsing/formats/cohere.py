r"""Cohere: Command R writes its calls as an action in a code fence, Command R7B and Command A between control tokens.

    COHERE    Action: ```json\n[{"tool_name": "add", "parameters": {"a": 1}}]\n```
    COHERE2   <|START_THINKING|>add them<|END_THINKING|><|START_ACTION|>[
                  {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}
              ]<|END_ACTION|>
              <|START_RESPONSE|>It is 3.<|END_RESPONSE|>

In both, a call's span is its object, and call ids that the model writes are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind
from unbroken.rendering.parsing.call_format import (
    CallAttempt,
    CallBody,
    CallFormat,
    Region,
    call_region,
    reasoning_region,
)
from unbroken.rendering.parsing.syntax.json_calls import make_json_calls_reader

_read_calls = make_json_calls_reader(
    name_keys=("tool_name", "name"), arguments_keys=("parameters", "arguments"), id_keys=("tool_call_id", "id")
)


def _read_fenced(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    """Only the last fence in the turn closes the list, because arguments may contain fences."""
    return _read_calls(replace(body, text=body.text.rstrip().removesuffix("```")), tools)


COHERE = CallFormat(
    name="cohere",
    regions=(Region(kind=PartKind.TOOL_CALL, opening="Action: ```json", read_calls=_read_fenced),),
    hints=("<|CHATBOT_TOKEN|>",),
)
COHERE2 = CallFormat(
    name="cohere2",
    regions=(
        reasoning_region("<|START_THINKING|>", "<|END_THINKING|>"),
        call_region("<|START_ACTION|>", "<|END_ACTION|>", _read_calls, ended_by=("<|START_RESPONSE|>",)),
    ),
    message_separators=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    hints=("<|START_RESPONSE|>",),
)
