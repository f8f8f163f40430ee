r"""Gemma 4 and FunctionGemma: calls without quotes, reasoning in a channel of Gemma 4.

    <|channel>thought\nadd them\n<channel|>Let me see.<|tool_call>call:add{a:1,b:<|"|>two<|"|>}<tool_call|>
                       `reasoning´         `-content-´`----------------- one call ------------------------´
    <start_function_call>call:add{a:1,b:<escape>two<escape>}<end_function_call>

A channel of another name is content. Gemma 4 stops after its calls with `<|tool_response>`.
"""

from __future__ import annotations

from unbroken.rendering.base import PartKind
from unbroken.rendering.parsing.call_format import Body, CallFormat, Header, Region, call_region
from unbroken.rendering.parsing.syntax.gemma_calls import read_gemma_call

_THOUGHT = Region(kind=PartKind.REASONING, closings=("<channel|>",), ended_by=("<|tool_call>",))


def _route(header: Body) -> Region | None:
    return _THOUGHT if header.text.strip() == "thought" else None


GEMMA4 = CallFormat(
    name="gemma4",
    regions=(
        _THOUGHT,
        call_region(
            "<|tool_call>", "<tool_call|>", read_gemma_call, ended_by=("<|tool_response>",), inner_delimiters=('<|"|>',)
        ),
    ),
    separators=("<|tool_response>",),
    header=Header(opening="<|channel>", closings=("\n",), route=_route),
    hints=("<|tool_call>",),
)
FUNCTION_GEMMA = CallFormat(
    name="function_gemma",
    regions=(
        call_region(
            "<start_function_call>",
            "<end_function_call>",
            read_gemma_call,
            ended_by=("<start_function_response>",),
            inner_delimiters=("<escape>",),
        ),
    ),
    separators=("<start_function_response>",),
    hints=("<start_function_call>",),
)
