"""gpt-oss: several messages in one completion, distinguished by their headers."""

import pytest

from support.parsing import FormatOnTokenizer
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.formats import HARMONY

CONTROL = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
FORM = FormatOnTokenizer(HARMONY, control=CONTROL, stops=("<|return|>", "<|call|>", "<|end|>"))
ANALYSIS = "<|channel|>analysis<|message|>add them<|end|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 3.<|return|>"


def test_channels_are_reasoning_and_content() -> None:
    parsed = FORM.parse(ANALYSIS + FINAL)
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == ("add them", "It is 3.", ())
    assert parsed.reasoning_complete


def test_several_messages_make_one_turn() -> None:
    text = ANALYSIS + PREAMBLE + ANALYSIS.replace("<|channel|>", "<|start|>assistant<|channel|>", 1) + CALL + "<|call|>"
    parsed = FORM.parse(text)
    assert (parsed.reasoning, parsed.content) == ("add them\nadd them", "Let me see.")
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("add", {"a": 1})]
    assert [kind for kind, _ in FORM.parts(text)] == [
        *("markup", "reasoning", "markup", "content", "markup", "reasoning", "markup", "tool_call", "stop")
    ]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.add <|constrain|>json",
        "<|channel|>commentary to=functions.add<|constrain|>json",
        "<|channel|>commentary to=functions.add",
        "<|channel|>analysis to=functions.add code",
        " to=functions.add<|channel|>commentary json",
        " to=functions.add<|channel|>commentary <|constrain|>json",
        "<|start|>assistant to=functions.add<|channel|>commentary",
        " to=add<|channel|>commentary",
    ],
)
def test_a_recipient_makes_a_call_wherever_it_stands_in_the_header(header: str) -> None:
    text = f'{header}<|message|>{{"a": 1}}'
    (call,) = FORM.parse(text + "<|call|>").tool_calls
    assert (call.name, call.arguments, call.status) == ("add", {"a": 1}, ToolCallStatus.OK)
    assert FORM.parts(text + "<|call|>") == [("tool_call", text), ("stop", "<|call|>")]


def test_white_space_of_a_message_is_its_own() -> None:
    parsed = FORM.parse(
        "<|channel|>analysis<|message|> a \n<|end|><|start|>assistant<|channel|>final<|message|>\n b <|return|>"
    )
    assert (parsed.reasoning, parsed.content) == (" a \n", "\n b ")


def test_a_completion_that_is_cut_is_read_as_far_as_it_goes() -> None:
    parsed = FORM.parse("<|channel|>analysis<|message|>add th")
    assert (parsed.reasoning, parsed.reasoning_complete) == ("add th", False)
    assert FORM.parse(ANALYSIS + "<|start|>assistant<|chan").reasoning == "add them"
    assert FORM.parse(ANALYSIS + CALL).tool_calls[0].status is ToolCallStatus.UNCLOSED
    assert FORM.parse(ANALYSIS + FINAL.removesuffix("3.<|return|>")).content == "It is "


def test_text_without_any_header_is_content() -> None:
    assert FORM.parse("It is 3.<|return|>").content == "It is 3."


@pytest.mark.parametrize(
    ("text", "status", "name"),
    [
        ("<|channel|>commentary to=functions.f<|message|>{<|call|>", ToolCallStatus.INVALID_JSON, "f"),
        ("<|channel|>commentary to=functions.f<|message|>[1]<|call|>", ToolCallStatus.INVALID_ARGUMENTS, "f"),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", ToolCallStatus.MISSING_NAME, ""),
        ("<|channel|>commentary to= <|message|>{}<|call|>", ToolCallStatus.MISSING_NAME, ""),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", ToolCallStatus.INVALID_JSON, "python"),
        ("<|channel|>commentary to=functions.f<|message|>{}", ToolCallStatus.UNCLOSED, ""),
        ("<|channel|>commentary to=functions.f<|message|>{}<|start|>assistant", ToolCallStatus.UNCLOSED, ""),
    ],
)
def test_a_malformed_call_is_data_with_its_status_and_span(text: str, status: ToolCallStatus, name: str) -> None:
    (call,) = FORM.parse(text).tool_calls
    assert (call.status, call.name) == (status, name)
    whole = text.removesuffix("<|call|>").removesuffix("<|start|>assistant")
    assert [part for kind, part in FORM.parts(text) if kind == "tool_call"] == [whole]


@pytest.mark.parametrize("recipient", ["user", "assistant", "all"])
def test_who_is_no_tool_gets_content(recipient: str) -> None:
    assert FORM.parse(f"<|channel|>commentary to={recipient}<|message|>Hello<|end|>").content == "Hello"
