"""Llama 3's calls: bare JSON, several of them, behind the tag, and what is an answer after all."""

from typing import Any

import pytest

from support.parsing import FormatOnTokenizer, tool
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import CallFormat
from unbroken.rendering.parsing.formats import LLAMA3, PYTHONIC, XLAM

FORM = FormatOnTokenizer(LLAMA3, control=("<|python_tag|>", "<|eom_id|>"), stops=("<|eot_id|>",))
ADD = '{"name": "add", "parameters": {"a": 1}}'
NOW = '{"name": "now", "parameters": {}}'


@pytest.mark.parametrize(
    "text",
    [
        f"{ADD}; {NOW}<|eot_id|>",
        f"{ADD};{NOW}",
        f"{ADD}\n{NOW}<|eot_id|>",
        f"<|python_tag|>{ADD}; {NOW}<|eom_id|>",
        f"<|python_tag|>{ADD}<|python_tag|>{NOW}<|eot_id|>",
        f"\n\n[{ADD}, {NOW}]<|eot_id|>".replace("\n\n[", "<|python_tag|>["),
    ],
)
def test_several_calls_each_have_their_own_span(text: str) -> None:
    ids = FORM.ids(text)
    calls = FORM.parser.parse(ids).tool_calls
    assert [(call.name, call.arguments, call.status) for call in calls] == [
        ("add", {"a": 1}, ToolCallStatus.OK),
        ("now", {}, ToolCallStatus.OK),
    ]
    assert calls[0].span[1] <= calls[1].span[0]
    kinds = [kind for kind, _ in FORM.parts(text)]
    assert kinds.count("tool_call") == 2


def test_arguments_may_be_called_so() -> None:
    assert FORM.parse('{"type": "function", "name": "f", "arguments": {"a": 1}}').tool_calls[0].arguments == {"a": 1}


def test_a_built_in_tool_is_called_by_its_name() -> None:
    parsed = FORM.parse('<|python_tag|>brave_search.call(query="when is high tide?")<|eom_id|><|eot_id|>')
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [
        ("brave_search", {"query": "when is high tide?"})
    ]
    assert parsed.content == ""


@pytest.mark.parametrize("text", ['{"answer": 42}', '{"a": {"name": "x"}}', "{not a call}", "{", '[{"name": 1}]', "{}"])
def test_an_answer_that_is_no_call_is_content(text: str) -> None:
    parsed = FORM.parse(text + "<|eot_id|>")
    assert parsed.content == text
    assert parsed.tool_calls == ()


def test_a_call_behind_text_is_text() -> None:
    assert FORM.parse(f"I call {ADD}<|eot_id|>").content == f"I call {ADD}"


@pytest.mark.parametrize(
    ("text", "status", "span"),
    [
        (
            '{"name": "f", "parameters": {"a": }}<|eot_id|>',
            ToolCallStatus.INVALID_JSON,
            '{"name": "f", "parameters": {"a": }}',
        ),
        ('{"name": "f", "parameters": {"a": 1', ToolCallStatus.UNCLOSED, '{"name": "f", "parameters": {"a": 1'),
        ('{"name": "", "parameters": {}}<|eot_id|>', ToolCallStatus.MISSING_NAME, '{"name": "", "parameters": {}}'),
        (
            '{"name": "f", "parameters": [1]}<|eot_id|>',
            ToolCallStatus.INVALID_ARGUMENTS,
            '{"name": "f", "parameters": [1]}',
        ),
        ('{"parameters": {"a": 1}}<|eot_id|>', ToolCallStatus.MISSING_NAME, '{"parameters": {"a": 1}}'),
        ('{"name": "f"}<|eot_id|>', ToolCallStatus.INVALID_ARGUMENTS, '{"name": "f"}'),
        ("<|python_tag|>print(1)<|eot_id|>", ToolCallStatus.INVALID_JSON, "print(1)"),
        ("<|python_tag|>f.call(1)<|eot_id|>", ToolCallStatus.INVALID_ARGUMENTS, "<|python_tag|>f.call(1)"),
        ("<|python_tag|>f.call(a=<|eot_id|>", ToolCallStatus.INVALID_SYNTAX, "<|python_tag|>f.call(a="),
    ],
)
def test_a_malformed_call_is_data_with_its_status_and_span(text: str, status: ToolCallStatus, span: str) -> None:
    (call,) = FORM.parse(text).tool_calls
    assert call.status is status
    assert call.name == ("f" if status in (ToolCallStatus.INVALID_ARGUMENTS, ToolCallStatus.INVALID_SYNTAX) else "")
    assert [part for kind, part in FORM.parts(text) if kind == "tool_call"] == [span]


def test_a_good_call_before_a_broken_one_counts() -> None:
    calls = FORM.parse(f'{ADD}; {{"name": "now", <|eot_id|>').tool_calls
    assert [call.status for call in calls] == [ToolCallStatus.OK, ToolCallStatus.INVALID_JSON]


TOOLS = [tool("add", a={"type": "integer"}), tool("now")]


@pytest.mark.parametrize(
    ("call_format", "text", "names"),
    [
        (LLAMA3, f"Let me see.\n{ADD}", ["add"]),
        (LLAMA3, f"Let me see. {ADD}; {NOW}", ["add", "now"]),
        (LLAMA3, f"Let me see. {ADD} It is 3.", []),
        (LLAMA3, 'Let me see. {"name": "other", "parameters": {}}', []),
        (LLAMA3, 'Let me see. {"name": "add"}', []),
        (LLAMA3, 'So: {"a": {"b": 1}}', []),
        (PYTHONIC, "Let me see [1]. [add(a=1), now()]", ["add", "now"]),
        (PYTHONIC, "The call [add(a=1)] gave 3.", []),
        (PYTHONIC, "See a[now()].", []),
        (XLAM, 'Let me see. [{"name": "add", "arguments": {"a": 1}}]', ["add"]),
    ],
)
def test_a_call_that_ends_a_turn_behind_text_stays_content_and_is_counted(
    call_format: CallFormat, text: str, names: list[str]
) -> None:
    form = FormatOnTokenizer(call_format)
    parsed = form.parse(f"{text}<|im_end|>", tools=TOOLS)
    assert parsed.content == text
    assert [(call.status, call.name) for call in parsed.tool_calls] == [
        (ToolCallStatus.BEHIND_TEXT, name) for name in names
    ]
    assert not form.parse(f"{text}<|im_end|>").tool_calls, "without tools nothing is a call"
    reader = form.parser.open_reader(tools=TOOLS)
    deltas = [*reader.feed(form.ids(f"{text}<|im_end|>")), *reader.close()]
    assert "".join(delta.text for delta in deltas) == text, "it is said once"


def test_tools_without_a_function_have_no_names_that_a_call_behind_text_could_have() -> None:
    form = FormatOnTokenizer(LLAMA3)
    tools: list[Any] = [{"type": "web_search"}, {"name": "add"}, {"function": {"name": 5}}, *TOOLS]
    parsed = form.parse(f"Let me see.\n{ADD}<|im_end|>", tools=tools)
    assert [call.name for call in parsed.tool_calls] == ["add"]
