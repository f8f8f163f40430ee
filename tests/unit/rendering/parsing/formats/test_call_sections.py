"""DeepSeek and Kimi K2: sections of calls, each call between control tokens."""

import time
from typing import Any

import pytest

from support.parsing import FormatOnTokenizer
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.formats import DEEPSEEK, KIMI_K2

DEEP = FormatOnTokenizer(DEEPSEEK, control=sorted(DEEPSEEK.delimiters), stops=("<｜end▁of▁sentence｜>",))
KIMI = FormatOnTokenizer(KIMI_K2, control=sorted(KIMI_K2.delimiters))
B, S, E = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KB, KS, KE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def fenced(name: str, arguments: str) -> str:
    return f"{B}function{S}{name}\n```json\n{arguments}\n```{E}"


def in_section(*calls: str, between: str = "") -> str:
    return "<｜tool▁calls▁begin｜>" + between.join(calls) + "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


@pytest.mark.parametrize(
    "text",
    [
        in_section(fenced("add", '{"a": 1}'), fenced("now", "{}"), between="\n"),
        in_section(f'{B}add{S}{{"a": 1}}{E}', f"{B}now{S}{{}}{E}"),
        in_section(f'{B}add{S}\n{{"a": 1}}\n{E}', f"{B}now{S}{E}"),
    ],
)
def test_deepseek_writes_arguments_with_and_without_a_fence(text: str) -> None:
    parsed = DEEP.parse(f"add them</think>Let me see.{text}", reasoning_opened=True)
    assert (parsed.reasoning, parsed.content) == ("add them", "Let me see.")
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("add", {"a": 1}), ("now", {})]
    spans = [part for kind, part in DEEP.parts(text) if kind == "tool_call"]
    assert all(span.startswith(B) and span.endswith(E) for span in spans)
    assert len(spans) == 2


def test_a_fence_inside_the_arguments_is_theirs() -> None:
    arguments: dict[str, Any] = {"code": "```json\n{}\n```"}
    text = in_section(fenced("run", '{"code": "```json\\n{}\\n```"}'), fenced("now", "{}"))
    assert [call.arguments for call in DEEP.parse(text).tool_calls] == [arguments, {}]


def test_long_runs_of_white_space_are_read_in_good_time() -> None:
    started = time.process_time()
    for body in (f"function{S}f\n```json\n{{{' ' * 200_000}", f"function{S}{' ' * 200_000}```", f"f{S}{' ' * 200_000}"):
        DEEP.parse(f"{B}{body}{E}")
    assert time.process_time() - started < 6


def test_a_tool_may_be_named_function() -> None:
    assert DEEP.parse(in_section(f'{B}function{S}{{"a": "```"}}{E}')).tool_calls[0].name == "function"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (f"function{S}f\n```json\n{{\n```", ToolCallStatus.INVALID_JSON),
        (f"function{S}f\n```json\n[1]\n```", ToolCallStatus.INVALID_ARGUMENTS),
        (f"function{S}\n```json\n{{}}\n```", ToolCallStatus.MISSING_NAME),
        (f"function{S}f\n{{}}", ToolCallStatus.INVALID_JSON),
        (f"f{S}{{", ToolCallStatus.INVALID_JSON),
        (f"f{S}3", ToolCallStatus.INVALID_ARGUMENTS),
        (f" {S}{{}}", ToolCallStatus.MISSING_NAME),
        ("f", ToolCallStatus.INVALID_SYNTAX),
        (f"f{S}{{}}{S}", ToolCallStatus.INVALID_SYNTAX),
    ],
)
def test_a_malformed_call_of_deepseek_is_data_with_its_status_and_span(body: str, status: ToolCallStatus) -> None:
    text = in_section(f"{B}{body}{E}", fenced("now", "{}"))
    calls = DEEP.parse(text).tool_calls
    assert [call.status for call in calls] == [status, ToolCallStatus.OK]
    assert next(part for kind, part in DEEP.parts(text) if kind == "tool_call") == f"{B}{body}{E}"
    assert DEEP.parse(f"{B}{body}").tool_calls[0].status is ToolCallStatus.UNCLOSED


def test_a_call_that_the_next_one_or_the_section_ends_is_unclosed() -> None:
    calls = DEEP.parse(in_section(f"{B}f{S}{{}}", fenced("now", "{}"), f"{B}g{S}{{}}")).tool_calls
    assert [call.status for call in calls] == [ToolCallStatus.UNCLOSED, ToolCallStatus.OK, ToolCallStatus.UNCLOSED]


@pytest.mark.parametrize(
    ("written", "name", "call_id"),
    [
        ("functions.add:0", "add", "functions.add:0"),
        ("functions.a.b:12", "a.b", "functions.a.b:12"),
        ("add:3", "add", "add:3"),
        ("functions.add", "add", ""),
        (" add ", "add", ""),
    ],
)
def test_the_id_of_kimi_names_the_function(written: str, name: str, call_id: str) -> None:
    text = f'Hm.<|tool_calls_section_begin|>{KB}{written}{KS}{{"a": 1}}{KE}<|tool_calls_section_end|><|im_end|>'
    (call,) = KIMI.parse(text).tool_calls
    assert (call.name, call.call_id, call.arguments) == (name, call_id, {"a": 1})
    assert KIMI.parse(text).content == "Hm."


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (f"functions.f:0{KS}{{", ToolCallStatus.INVALID_JSON),
        (f"functions.f:0{KS}[]", ToolCallStatus.INVALID_ARGUMENTS),
        (f"{KS}{{}}", ToolCallStatus.MISSING_NAME),
        (f"two words:0{KS}{{}}", ToolCallStatus.MISSING_NAME),
        ("functions.f:0", ToolCallStatus.INVALID_SYNTAX),
    ],
)
def test_a_malformed_call_of_kimi_is_data_with_its_status_and_span(body: str, status: ToolCallStatus) -> None:
    text = f"{KB}{body}{KE}<|tool_calls_section_end|><|im_end|>"
    (call,) = KIMI.parse(text).tool_calls
    assert (call.status, call.name, call.call_id) == (
        status,
        "f" if KS in body and body.startswith("functions") else "",
        "",
    )
    assert [part for kind, part in KIMI.parts(text) if kind == "tool_call"] == [f"{KB}{body}{KE}"]
    assert KIMI.parse(f"{KB}{body}<|tool_calls_section_end|>").tool_calls[0].status is ToolCallStatus.UNCLOSED
