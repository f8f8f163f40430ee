"""Cohere, Granite, Nemotron, Phi and xLAM: JSON lists of calls between delimiters of their own."""

import pytest

from support.parsing import FormatOnTokenizer
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.formats import COHERE, COHERE2, GRANITE, INTERNLM, NEMOTRON, PHI, XLAM

COMMAND_R = FormatOnTokenizer(COHERE)
COMMAND_A = FormatOnTokenizer(COHERE2, control=sorted(COHERE2.delimiters))
LLAMA_NEMOTRON = FormatOnTokenizer(NEMOTRON)
PHI_4 = FormatOnTokenizer(PHI, control=("<|tool_call|>", "<|/tool_call|>"))
GRANITE_3 = FormatOnTokenizer(GRANITE, control=("<|tool_call|>",))
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
    "granite": (GRANITE_3, "<|tool_call|>[", ADD, ", ", NOW, "]"),
    "granite, as text": (GRANITE_3, "<tool_call>[", ADD, ", ", NOW, "]"),
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


def test_granite_may_open_each_call() -> None:
    parsed = GRANITE_3.parse(f"so\n<|tool_call|> {ADD}\n<|tool_call|> {NOW}<|im_end|>")
    assert [(call.name, call.raw.strip()) for call in parsed.tool_calls] == [("add", ADD), ("now", NOW)]
    assert parsed.content == "so"


@pytest.mark.parametrize(
    ("text", "content", "statuses"),
    [
        (f"[{ADD}]", "", [ToolCallStatus.OK]),
        ('[{"name": "f", "arguments": 3}]', "", [ToolCallStatus.INVALID_ARGUMENTS]),
        ('[{"name": "f", "argu', "", [ToolCallStatus.INVALID_JSON]),
        ('[{"city": "Oslo"}]', '[{"city": "Oslo"}]', []),
        ("[1] a note", "[1] a note", []),
        (f"so [{ADD}]", f"so [{ADD}]", []),
    ],
)
def test_a_turn_of_xlam_that_begins_with_a_bracket_is_calls_or_content(
    text: str, content: str, statuses: list[ToolCallStatus]
) -> None:
    parsed = FormatOnTokenizer(XLAM).parse(f"{text}<|im_end|>")
    assert (parsed.content, [call.status for call in parsed.tool_calls]) == (content, statuses)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (f"<|plugin|>\n{ADD}\n<|action_end|>", ToolCallStatus.OK),
        ('<|plugin|>{"name": "add", "parameters": {"a": 1}}<|action_end|>', ToolCallStatus.OK),
        ("<|interpreter|>\nprint(1)<|action_end|>", ToolCallStatus.INVALID_SYNTAX),
        (f"{ADD}<|action_end|>", ToolCallStatus.INVALID_SYNTAX),
        ("<|plugin|>add<|action_end|>", ToolCallStatus.INVALID_JSON),
        (f"<|plugin|>{ADD}", ToolCallStatus.UNCLOSED),
    ],
)
def test_an_action_of_internlm_has_a_status(body: str, status: ToolCallStatus) -> None:
    form = FormatOnTokenizer(INTERNLM, control=sorted(INTERNLM.delimiters))
    parsed = form.parse(f"so<|action_start|>{body}<|im_end|>")
    assert (parsed.content, [call.status for call in parsed.tool_calls]) == ("so", [status])
