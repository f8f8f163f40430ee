"""JSON calls of Apertus, GigaChat and Llama 4, and those in messages: Solar Open, Inkling and Functionary."""

import pytest

from support.parsing import FormatOnTokenizer
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.formats import (
    APERTUS,
    FUNCTIONARY,
    FUNCTIONARY_V31,
    GIGACHAT,
    GIGACHAT3,
    INKLING,
    LLAMA4,
    SOLAR,
)

OK, JSON, NAMELESS = ToolCallStatus.OK, ToolCallStatus.INVALID_JSON, ToolCallStatus.MISSING_NAME
SYNTAX, UNCLOSED, ARGUMENTS = ToolCallStatus.INVALID_SYNTAX, ToolCallStatus.UNCLOSED, ToolCallStatus.INVALID_ARGUMENTS

ON_APERTUS = FormatOnTokenizer(APERTUS, control=("<|tools_prefix|>", "<|tools_suffix|>"), stops=("<|tools_suffix|>",))
ON_GIGACHAT = FormatOnTokenizer(GIGACHAT, control=("<|function_call|>",), stops=("<|message_sep|>",))
ON_GIGACHAT3 = FormatOnTokenizer(GIGACHAT3, control=("<|role_sep|>",), stops=("<|message_sep|>", "</s>"))
ON_FUNCTIONARY_V31 = FormatOnTokenizer(
    FUNCTIONARY_V31, control=("<|eom_id|>", "<|python_tag|>"), stops=("<|eot_id|>", "<|eom_id|>")
)
ON_LLAMA = FormatOnTokenizer(LLAMA4, control=("<|python_start|>", "<|python_end|>"), stops=("<|eot|>",))
ON_SOLAR = FormatOnTokenizer(
    SOLAR,
    control=(
        *("<|begin|>", "<|think|>", "<|content|>", "<|end|>", "<|tool_calls|>"),
        *("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),
    ),
    stops=("<|calls|>", "<|end|>"),
)
ON_INKLING = FormatOnTokenizer(
    INKLING,
    control=(
        "<|message_model|>",
        "<|end_message|>",
        "<|content_thinking|>",
        "<|content_text|>",
        "<|content_invoke_tool_json|>",
    ),
    stops=("<|content_model_end_sampling|>",),
)
ON_FUNCTIONARY = FormatOnTokenizer(FUNCTIONARY, stops=("<|eot_id|>",))


@pytest.mark.parametrize(
    ("inner", "statuses"),
    [
        ('[{"f": {"a": 1}}, {"g": {}}]', [OK, OK]),
        ('[{"f": 1}]', [ARGUMENTS]),
        ('[{"f": {}, "g": {}}]', [NAMELESS]),
        ('[{"": {}}, "f"]', [NAMELESS, NAMELESS]),
        ('[{"f": {}}', [JSON]),
    ],
)
def test_apertus_calls_have_a_status(inner: str, statuses: list[ToolCallStatus]) -> None:
    parsed = ON_APERTUS.parse(f"<|inner_prefix|>hm<|inner_suffix|>so<|tools_prefix|>{inner}<|tools_suffix|>")
    assert [call.status for call in parsed.tool_calls] == statuses
    assert (parsed.reasoning, parsed.content) == ("hm", "so")


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        ('{"name": "f", "arguments": {}}<|message_sep|>', [OK]),
        ('{"name": "f", "arguments": {}}', [OK]),
        ('{"name": "f", "argum<|message_sep|>', [JSON]),
        ('{"name": "f", "argum', [UNCLOSED]),
        ("{}<|message_sep|>", [NAMELESS]),
    ],
)
def test_gigachat_calls_have_a_status(text: str, statuses: list[ToolCallStatus]) -> None:
    parsed = ON_GIGACHAT.parse(f"so<|function_call|>{text}")
    assert [call.status for call in parsed.tool_calls] == statuses
    assert (parsed.content, parsed.tool_calls[0].raw) == ("so", text.removesuffix("<|message_sep|>"))


@pytest.mark.parametrize("content", ["so", ""])
@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        ('{"name": "f", "arguments": {}}<|message_sep|>', [OK]),
        ('{"name": "f", "arguments": {}}</s>', [OK]),
        ('{"name": "f", "argum</s>', [JSON]),
        ('{"name": "f", "argum', [UNCLOSED]),
        ("", [UNCLOSED]),
    ],
)
def test_gigachat_3_0_calls_are_messages_of_their_own(text: str, statuses: list[ToolCallStatus], content: str) -> None:
    parsed = ON_GIGACHAT3.parse(f"{content}<|message_sep|>\n\nfunction call<|role_sep|>\n{text}")
    assert ([call.status for call in parsed.tool_calls], parsed.content) == (statuses, content)


def test_gigachat_3_0_text_about_a_function_call_is_text() -> None:
    spelled = ON_GIGACHAT3.spelled('function call<|role_sep|>\n{"name": "f", "arguments": {}}')
    parsed = ON_GIGACHAT3.parser.parse([*spelled, *ON_GIGACHAT3.ids("</s>")])
    assert parsed.tool_calls == ()
    assert parsed.content == 'function call<|role_sep|>\n{"name": "f", "arguments": {}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<function=f>{"a": 1}</function><|eom_id|>', [(OK, "f", {"a": 1})]),
        (
            '<function=f>{}</function><function=g>{"a": ">"}</function><|eom_id|>',
            [(OK, "f", {}), (OK, "g", {"a": ">"})],
        ),
        ('<function=f>{"a": 1}</function><function=g>{"a', [(OK, "f", {"a": 1}), (UNCLOSED, "", {})]),
        ("<function=f>3</function>", [(ARGUMENTS, "f", {})]),
        ("<function=f>{</function>", [(JSON, "f", {})]),
        ("<function=>{}</function>", [(NAMELESS, "", {})]),
        ("<function=f</function>", [(SYNTAX, "", {})]),
        ('<|python_tag|>{"code": "1"}<|eom_id|>', [(OK, "python", {"code": "1"})]),
        ("<|python_tag|>1 + 1<|eom_id|>", [(JSON, "python", {})]),
        ("<|python_tag|>1 + 1", [(UNCLOSED, "python", {})]),
    ],
)
def test_functionary_3_1_calls_have_a_status(text: str, calls: list[tuple[ToolCallStatus, str, object]]) -> None:
    parsed = ON_FUNCTIONARY_V31.parse(f"so{text}")
    assert [(call.status, call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert parsed.content == "so"


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (
            '<|python_start|>so<|python_end|>{"name": "f", "parameters": {}}{"name": "g", "parameters": {}}',
            "so",
            ["f", "g"],
        ),
        ('{"name": "f", "parameters": {}}', "", ["f"]),
        ('<|python_start|>{"name": "f", "parameters": {}}<|python_end|>', "", ["f"]),
        ("<|python_start|>so<|python_end|>", "so", []),
        ('so {"name": "f", "parameters": {}}', 'so {"name": "f", "parameters": {}}', []),
        ("<|python_start|><|python_end|>[f(a=1)]", "", [""]),
    ],
)
def test_llama4_calls_follow_the_python_tokens_or_begin_the_turn(text: str, content: str, names: list[str]) -> None:
    parsed = ON_LLAMA.parse(f"{text}<|eot|>")
    assert (parsed.content, [call.name for call in parsed.tool_calls]) == (content, names)


def test_a_turn_of_solar_is_messages_whose_calls_keep_their_ids() -> None:
    call = '<|tool_call:begin|>a1b2<|tool_call:name|>f<|tool_call:args|>{"a": 1}<|tool_call:end|>'
    text = (
        "<|think|> hm\n<|end|><|begin|>assistant<|content|>so <|end|><|begin|>assistant<|tool_calls|>"
        f"{call}<|tool_call:begin|>c3<|tool_call:name|>g<|tool_call:end|><|calls|>"
    )
    parsed = ON_SOLAR.parse(text)
    assert (parsed.reasoning, parsed.content) == (" hm\n", "so ")
    assert [(c.status, c.name, c.call_id) for c in parsed.tool_calls] == [(OK, "f", "a1b2"), (SYNTAX, "", "")]
    assert parsed.tool_calls[0].full_text == call
    assert ON_SOLAR.parse("<|think|>hm").reasoning_complete is False


def test_a_turn_of_inkling_is_messages_named_after_their_tools() -> None:
    text = (
        "<|content_thinking|>hm<|end_message|><|message_model|><|content_text|> so<|end_message|>"
        '<|message_model|>f<|content_invoke_tool_json|>{"name":"f","args":{"a":1}}<|end_message|>'
        "<|message_model|>g<|content_invoke_tool_json|>{}<|end_message|><|content_model_end_sampling|>"
    )
    parsed = ON_INKLING.parse(text)
    assert (parsed.reasoning, parsed.content) == ("hm", " so")
    assert [(c.status, c.name, c.arguments) for c in parsed.tool_calls] == [(OK, "f", {"a": 1}), (NAMELESS, "", {})]
    assert [c.status for c in ON_INKLING.parse('f<|content_invoke_tool_json|>{"name":"f"').tool_calls] == [UNCLOSED]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("all\nso", "so", []),
        ('f\n{"a": ">>>g\\n"}', "", [("f", OK)]),
        ('all\nso>>>f\n{"a": 1}>>>g\n{}', "so", [("f", OK), ("g", OK)]),
        ("all\na >>> b\nall\n>>> c", "a >>> b\nall\n>>> c", []),
        ("all\n1 >>> 2", "1 >>> 2", []),
        ('f\n{"a": 1', "", [("f", UNCLOSED)]),
        ('f\n{"a": 1}oops', "", [("f", OK), ("", UNCLOSED)]),
        ("f\n[1]", "", [("f", UNCLOSED)]),
        ("f\n", "", [("f", UNCLOSED)]),
    ],
)
def test_functionary_names_the_recipient_of_each_part(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    parsed = ON_FUNCTIONARY.parse(text)
    assert (parsed.content, [(c.name, c.status) for c in parsed.tool_calls]) == (content, calls)


@pytest.mark.parametrize(
    ("text", "status"), [("f\n[1]", ARGUMENTS), ("f\n{", JSON), ("f\n", JSON), ("f\n{} x", SYNTAX)]
)
def test_functionary_calls_of_a_finished_turn_have_a_status(text: str, status: ToolCallStatus) -> None:
    assert ON_FUNCTIONARY.parse(f"{text}<|eot_id|>").tool_calls[-1].status is status
