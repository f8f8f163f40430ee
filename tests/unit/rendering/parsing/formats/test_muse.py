"""Muse: messages to itself, to the user, and to tools."""

import pytest

from support.parsing import FormatOnTokenizer, tool
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.formats import MUSE

FORM = FormatOnTokenizer(MUSE, control=("<|start|>", "<|message|>", "<|eom|>"), stops=("<|eot|>",))
THOUGHT = " to=self<|message|>add them<|eom|><|start|>assistant"
ADD = (
    '<atem:invoke name="add">\n<atem:parameter name="a">1</atem:parameter>\n'
    '<atem:parameter name="b"> x\n</atem:parameter>\n</atem:invoke>'
)
NOW = '<atem:invoke name="now">\n</atem:invoke>'


def calls(*invocations: str) -> str:
    return " to=tools<|message|><atem:function_calls>\n" + "\n".join(invocations) + "\n</atem:function_calls>"


def test_recipients_tell_reasoning_content_and_calls_apart() -> None:
    parsed = FORM.parse(f"{THOUGHT} to=user<|message|>It is 3.<|eot|>")
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == ("add them", "It is 3.", ())
    parsed = FORM.parse(f"{THOUGHT}{calls(ADD)}<|eom|><|start|>assistant{calls(NOW)}<|eot|>")
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("add", {"a": 1, "b": " x\n"}), ("now", {})]
    assert (parsed.reasoning, parsed.content) == ("add them", "")


def test_a_message_may_hold_several_calls_each_with_its_span() -> None:
    text = calls(ADD, NOW) + "<|eot|>"
    assert [part.strip() for kind, part in FORM.parts(text) if kind == "tool_call"] == [ADD, NOW]


def test_arguments_have_the_types_of_the_schema() -> None:
    tools = (tool("add", a={"type": "string"}),)
    assert FORM.parse(calls(ADD), tools=tools).tool_calls[0].status is ToolCallStatus.UNCLOSED
    assert FORM.parse(calls(ADD) + "<|eot|>", tools=tools).tool_calls[0].arguments["a"] == "1"


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        (calls(ADD.replace("</atem:invoke>", "")), ["invalid_syntax"]),
        (calls(ADD, NOW.replace("</atem:invoke>", "")), ["ok", "invalid_syntax"]),
        (calls(ADD) + " and more", ["ok", "invalid_syntax"]),
        (calls(NOW.replace("now", "")), ["missing_name"]),
        (calls(ADD.replace('"b"', '"a"')), ["invalid_syntax"]),
        (" to=add<|message|>a=1", ["invalid_syntax"]),
        (" to=add<|message|>", ["invalid_syntax"]),
    ],
)
def test_a_malformed_call_is_data_with_its_status(text: str, statuses: list[str]) -> None:
    assert [call.status.value for call in FORM.parse(text + "<|eot|>").tool_calls] == statuses
    assert [call.status.value for call in FORM.parse(text).tool_calls] == ["unclosed"]
    assert [call.status.value for call in FORM.parse(text + "<|start|>").tool_calls] == ["unclosed"]
