"""Cohere, Nemotron and Phi: JSON lists of calls between delimiters of their own."""

import pytest

from support.parsing import FormatOnTokenizer
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.formats import COHERE, COHERE2, NEMOTRON, PHI

COMMAND_R = FormatOnTokenizer(COHERE)
COMMAND_A = FormatOnTokenizer(COHERE2, control=sorted(COHERE2.delimiters))
LLAMA_NEMOTRON = FormatOnTokenizer(NEMOTRON)
PHI_4 = FormatOnTokenizer(PHI, control=("<|tool_call|>", "<|/tool_call|>"))
ADD, NOW = '{"name": "add", "arguments": {"a": 1}}', '{"name": "now", "arguments": {}}'
ADD_TOOL, NOW_TOOL = (
    '{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}',
    '{"tool_name": "now", "parameters": {}}',
)
FORMS = {
    "command r": (COMMAND_R, "Action: ```json\n[\n", ADD_TOOL, ",\n", NOW_TOOL, "\n]\n```"),
    "command a": (COMMAND_A, "<|START_ACTION|>[\n", ADD_TOOL, ",\n", NOW_TOOL, "\n]<|END_ACTION|>"),
    "nemotron": (LLAMA_NEMOTRON, "<TOOLCALL>[", ADD, ", ", NOW, "]</TOOLCALL>"),
    "phi": (PHI_4, "<|tool_call|>[", ADD, ",", NOW, "]<|/tool_call|>"),
    "phi, without control tokens": (PHI_4, "functools[", ADD, ",", NOW, "]"),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_call_of_a_list_has_its_span(name: str) -> None:
    form, before, first, between, second, after = FORMS[name]
    text = f"Let me see. {before}{first}{between}{second}{after}<|im_end|>"
    parsed = form.parse(text)
    assert parsed.content == "Let me see."
    assert [(call.name, call.arguments, call.raw) for call in parsed.tool_calls] == [
        ("add", {"a": 1}, first),
        ("now", {}, second),
    ]
    assert [kind for kind, _ in form.parts(text)].count("tool_call") == 2


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    ("second", "status"),
    [
        ("{", ToolCallStatus.INVALID_JSON),
        ("words", ToolCallStatus.INVALID_JSON),
        ("3", ToolCallStatus.MISSING_NAME),
        ('{"name": "f", "tool_name": "f", "arguments": 3, "parameters": 3}', ToolCallStatus.INVALID_ARGUMENTS),
        ('{"name": "", "arguments": {}, "parameters": {}}', ToolCallStatus.MISSING_NAME),
    ],
)
def test_a_malformed_call_is_data_with_its_status(name: str, second: str, status: ToolCallStatus) -> None:
    form, before, first, between, _, after = FORMS[name]
    calls = form.parse(f"{before}{first}{between}{second}{after}<|im_end|>").tool_calls
    assert [call.status for call in calls] == [ToolCallStatus.OK, status]
    assert calls[1].name == ("f" if status is ToolCallStatus.INVALID_ARGUMENTS else "")


@pytest.mark.parametrize("name", FORMS)
def test_a_list_that_was_cut_has_an_unclosed_call(name: str) -> None:
    form, before, first, between, second, _ = FORMS[name]
    calls = form.parse(f"{before}{first}{between}{second[:-4]}").tool_calls
    assert calls[-1].status is ToolCallStatus.UNCLOSED


def test_command_a_keeps_ids_reasoning_and_the_text_of_its_response() -> None:
    parsed = COMMAND_A.parse(
        f"<|START_THINKING|>so<|END_THINKING|><|START_ACTION|>[{ADD_TOOL}]<|END_ACTION|><|im_end|>"
    )
    assert (parsed.reasoning, [call.call_id for call in parsed.tool_calls]) == ("so", ["0"])
    assert COMMAND_A.parse("<|START_RESPONSE|>It is 3.<|END_RESPONSE|><|im_end|>").content == "It is 3."


def test_command_r_may_pass_a_fence() -> None:
    text = 'Action: ```json\n[{"tool_name": "run", "parameters": {"code": "```py\\n1\\n```"}}]\n```<|im_end|>'
    assert COMMAND_R.parse(text).tool_calls[0].arguments == {"code": "```py\n1\n```"}


@pytest.mark.parametrize("name", ["command a", "nemotron", "phi"])
def test_a_list_in_which_another_one_opens_is_unclosed(name: str) -> None:
    form, before, first, _, second, after = FORMS[name]
    calls = form.parse(f"{before}{first}{before}{second}{after}<|im_end|>").tool_calls
    assert [call.status for call in calls] == [ToolCallStatus.UNCLOSED, ToolCallStatus.OK]
