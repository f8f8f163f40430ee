"""Gemma's calls without quotes, and its channel of thoughts."""

import time

import pytest

from support.parsing import FormatOnTokenizer
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.formats import FUNCTION_GEMMA, GEMMA4

Q = '<|"|>'
FORM = FormatOnTokenizer(
    GEMMA4,
    control=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", Q),
    stops=("<turn|>", "<|tool_response>"),
)
SMALL = FormatOnTokenizer(FUNCTION_GEMMA, control=sorted(FUNCTION_GEMMA.delimiters), stops=("<end_of_turn>",))


def test_thoughts_content_and_calls_are_separated() -> None:
    call = f"<|tool_call>call:add{{a:1,b:{Q}two{Q}}}<tool_call|>"
    text = f"<|channel>thought\nadd them\n<channel|>Let me see.{call}<|tool_response>"
    parsed = FORM.parse(text)
    assert (parsed.reasoning, parsed.content) == ("add them", "Let me see.")
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("add", {"a": 1, "b": "two"})]
    parts = FORM.parts(text)
    assert [kind for kind, _ in parts] == ["markup", "reasoning", "markup", "content", "tool_call", "stop"]
    assert parts[4][1] == call


def test_another_channel_and_lines_are_content() -> None:
    assert (
        FORM.parse("<|channel>other\nText.\n\nMore thought\n<turn|>").content
        == "<|channel>other\nText.\n\nMore thought\n"
    )


def test_a_channel_that_is_spelled_is_content() -> None:
    ids = [*FORM.spelled("<|channel>thought\nText."), *FORM.ids("<turn|>")]
    assert FORM.parser.parse(ids).content == "<|channel>thought\nText."


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{}", {}),
        ("{a:1,b:-2.5,c:1e-07}", {"a": 1, "b": -2.5, "c": 1e-07}),
        ("{a:true,b:False,c:null,d:None}", {"a": True, "b": False, "c": None, "d": None}),
        (f"{{a:[1,{Q}x{Q},[]],b:{{c:{{}}}}}}", {"a": [1, "x", []], "b": {"c": {}}}),
        (f"{{{Q}a b:{Q}:{Q}{{}},:[{Q}}}", {"a b:": "{},:["}),
        (f"{{a:{Q}{Q},b:{Q} x\n{Q}}}", {"a": "", "b": " x\n"}),
        (f" {{ a : 1 , b : {Q}x{Q} }} ", {"a": 1, "b": "x"}),
    ],
)
def test_values_are_read(written: str, arguments: dict[str, object]) -> None:
    (call,) = FORM.parse(f"<|tool_call>call:f{written}<tool_call|>").tool_calls
    assert (call.status, call.arguments) == (ToolCallStatus.OK, arguments)
    text = f"<start_function_call>call:f{written.replace(Q, '<escape>')}<end_function_call><end_of_turn>"
    assert SMALL.parse(text).tool_calls[0].arguments == arguments


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("call:f{a:1", ToolCallStatus.INVALID_SYNTAX),
        ("call:f{a:1}}", ToolCallStatus.INVALID_SYNTAX),
        ("call:f{a:1}{}", ToolCallStatus.INVALID_SYNTAX),
        ("call:f{a 1}", ToolCallStatus.INVALID_SYNTAX),
        ("call:f{a:}", ToolCallStatus.INVALID_SYNTAX),
        ("call:f{a:1 b:2}", ToolCallStatus.INVALID_SYNTAX),
        ("call:f{a:1,a:2}", ToolCallStatus.INVALID_SYNTAX),
        ("call:f{a:word}", ToolCallStatus.INVALID_SYNTAX),
        ('call:f{a:"x"}', ToolCallStatus.INVALID_SYNTAX),
        ("call:f{a:NaN}", ToolCallStatus.INVALID_SYNTAX),
        ('call:f{"a":1}', ToolCallStatus.INVALID_SYNTAX),
        ("call:f{a:{'k':1}}", ToolCallStatus.INVALID_SYNTAX),
        (f"call:f{{a:{Q}x}}", ToolCallStatus.INVALID_SYNTAX),
        (f"call:f{{a:{Q}x{Q}{Q}y{Q}}}", ToolCallStatus.INVALID_SYNTAX),
        (f"call:f{{a:1{Q}x{Q}}}", ToolCallStatus.INVALID_SYNTAX),
        ("call:f{a:" + "[" * 5000 + "]" * 5000 + "}", ToolCallStatus.INVALID_SYNTAX),
        ("call:f[1]", ToolCallStatus.INVALID_SYNTAX),
        ("call:f", ToolCallStatus.INVALID_SYNTAX),
        ("f{}", ToolCallStatus.INVALID_SYNTAX),
        ("", ToolCallStatus.INVALID_SYNTAX),
        ("call:{}", ToolCallStatus.MISSING_NAME),
    ],
)
def test_a_malformed_call_is_data_with_its_status_and_span(body: str, status: ToolCallStatus) -> None:
    text = f"<|tool_call>{body}<tool_call|>"
    (call,) = FORM.parse(text).tool_calls
    assert (call.status, call.name, call.arguments) == (status, "", {})
    assert FORM.parts(text) == [("tool_call", text)]
    assert FORM.parse(f"<|tool_call>{body}").tool_calls[0].status is ToolCallStatus.UNCLOSED
    assert FORM.parse(f"<|tool_call>{body}<|tool_response>").tool_calls[0].status is ToolCallStatus.UNCLOSED


def test_many_strings_are_read_in_good_time() -> None:
    started = time.process_time()
    members = ",".join(f"k{k}:{Q}v{Q},n{k}:{k}" for k in range(8000))
    (call,) = FORM.parse(f"<|tool_call>call:f{{{members}}}<tool_call|>").tool_calls
    assert len(call.arguments) == 16_000
    assert time.process_time() - started < 6
