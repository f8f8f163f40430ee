"""The formats that write arguments between tags: Qwen3-Coder, GLM and MiniMax."""

from typing import Any

import pytest

from support.parsing import FormatOnTokenizer, tool
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.formats import GLM as GLM_FORMAT
from unbroken.rendering.parsing.formats import MINIMAX_M1, MINIMAX_M2, QWEN3_CODER

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
ARG_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
QWEN = FormatOnTokenizer(QWEN3_CODER, control=TAGS)
GLM = FormatOnTokenizer(GLM_FORMAT, control=(*TAGS, *ARG_TAGS))
M1 = FormatOnTokenizer(MINIMAX_M1)
M2 = FormatOnTokenizer(MINIMAX_M2, control=("<minimax:tool_call>", "</minimax:tool_call>"))
OK, SYNTAX, NAMELESS = ToolCallStatus.OK, ToolCallStatus.INVALID_SYNTAX, ToolCallStatus.MISSING_NAME


def qwen(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


def test_qwen3_coder_values_are_what_stands_between_the_tags_less_one_newline_on_each_side() -> None:
    text = qwen("<function=f>\n<parameter=a>\n\n x\n<parameter=b>\n\n</parameter>\n</function>")
    (call,) = QWEN.parse(f"<think>\nhm</think>\nso\n{text}").tool_calls
    assert (call.status, call.name, call.arguments) == (OK, "f", {"a": "\n x\n<parameter=b>\n"})


@pytest.mark.parametrize(
    ("inner", "status", "arguments"),
    [
        ("<function=f></function>", OK, {}),
        ("<function=f><parameter=a>1</parameter><parameter=b>x</parameter></function>", OK, {"a": 1, "b": "x"}),
        ("<function=></function>", NAMELESS, {}),
        ("", SYNTAX, {}),
        ("<function=f", SYNTAX, {}),
        ("<function=f>", SYNTAX, {}),
        ("<function=f><parameter=a>1</function>", SYNTAX, {}),
        ("<function=f>oops</function>", SYNTAX, {}),
        ("<function=f></function>oops", SYNTAX, {}),
        ("oops<function=f></function>", SYNTAX, {}),
        ("<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", SYNTAX, {}),
        ('{"name": "f", "arguments": {}}', SYNTAX, {}),
    ],
)
def test_qwen3_coder_calls_have_a_status(inner: str, status: ToolCallStatus, arguments: dict[str, Any]) -> None:
    (call,) = QWEN.parse(f"<tool_call>{inner}</tool_call>").tool_calls
    assert (call.status, call.arguments, call.raw) == (status, arguments, inner)


@pytest.mark.parametrize(
    ("inner", "properties", "status", "arguments"),
    [
        ("<parameter=a>b>\nx\n</parameter>", ("a>b",), OK, {"a>b": "x"}),
        ("<parameter=a>b>\nx\n</parameter>", ("a", "a>b"), OK, {"a>b": "x"}),
        ("<parameter=a><i>\nx</i>\n</parameter>", ("a",), OK, {"a": "<i>\nx</i>"}),
        ("<parameter=a>b>\nx\n</parameter>", ("c",), SYNTAX, {}),
        ("<parameter=a>b>\nx\n</parameter>", (), SYNTAX, {}),
        ("<parameter=a>\nx > y>\nz\n</parameter>", (), OK, {"a": "x > y>\nz"}),
        ("<parameter=a>x > y</parameter>\n<parameter=b>\n1\n</parameter>", (), OK, {"a": "x > y", "b": 1}),
    ],
)
def test_a_qwen3_coder_parameter_whose_name_ends_in_doubt_is_that_of_the_tool_or_refused(
    inner: str, properties: tuple[str, ...], status: ToolCallStatus, arguments: dict[str, Any]
) -> None:
    tools = [tool("f", **{name: {"type": "string"} for name in properties})]
    (call,) = QWEN.parse(qwen(f"<function=f>\n{inner}\n</function>"), tools=tools).tool_calls
    assert (call.status, call.arguments) == (status, arguments)


def test_glm_keys_and_values_alternate() -> None:
    arguments = "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value> x\n</arg_value>\n"
    text = f"<tool_call>f\n{arguments}"
    (call,) = GLM.parse(f"\n<think></think>\nso\n{text}</tool_call>").tool_calls
    assert (call.status, call.name, call.arguments) == (OK, "f", {"a": 1, "b": " x\n"})


@pytest.mark.parametrize(
    ("inner", "status"),
    [
        ("f", OK),
        (" f \n", OK),
        ("", NAMELESS),
        ("<arg_key>a</arg_key><arg_value>1</arg_value>", NAMELESS),
        ("f g", SYNTAX),
        ('{"name":"f","arguments":{}}', SYNTAX),
        ("f<arg_key>a</arg_key>", SYNTAX),
        ("f<arg_value>1</arg_value>", SYNTAX),
        ("f<arg_key>a</arg_key><arg_value>1", SYNTAX),
        ("f<arg_key>a</arg_key><arg_value>1</arg_value>g", SYNTAX),
        ("f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2, SYNTAX),
    ],
)
def test_glm_calls_have_a_status(inner: str, status: ToolCallStatus) -> None:
    (call,) = GLM.parse(f"<tool_call>{inner}</tool_call>").tool_calls
    assert call.status is status


def test_a_tag_that_the_model_spells_in_a_value_is_text() -> None:
    value = "</arg_value></tool_call>"
    ids = [
        *GLM.ids("<tool_call>f<arg_key>a</arg_key><arg_value>"),
        *GLM.spelled(value),
        *GLM.ids("</arg_value></tool_call>"),
    ]
    (call,) = GLM.parser.parse(ids).tool_calls
    assert (call.status, call.arguments) == (OK, {"a": value})


def test_minimax_m1_calls_are_lines_of_json() -> None:
    one, two = '{"name": "f", "arguments": {"a": [1]}}', '{"name": "g", "arguments": {}}'
    parsed = M1.parse(f"<think>hm</think>so\n<tool_calls>\n{one}\n{two}\n</tool_calls>")
    assert [(call.name, call.arguments, call.raw) for call in parsed.tool_calls] == [
        ("f", {"a": [1]}, one),
        ("g", {}, two),
    ]
    assert (parsed.reasoning, parsed.content) == ("hm", "so")


def invoke(name: str, **texts: str) -> str:
    parameters = "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in texts.items())
    return f'<invoke name="{name}">\n{parameters}</invoke>'


def test_minimax_m2_calls_are_tags_with_names() -> None:
    one, two = invoke("f", a="1", b=" <b>\n"), invoke("g")
    parsed = M2.parse(f"<minimax:tool_call>\n{one}\n{two}\n</minimax:tool_call>")
    assert [(call.name, call.arguments, call.raw) for call in parsed.tool_calls] == [
        ("f", {"a": 1, "b": " <b>\n"}, one),
        ("g", {}, two),
    ]


@pytest.mark.parametrize(
    ("inner", "statuses"),
    [
        ("", []),
        ("oops", [SYNTAX]),
        (invoke(""), [NAMELESS]),
        (invoke("f") + "oops", [OK, SYNTAX]),
        (invoke("f", a="1").replace("</parameter>", ""), [SYNTAX]),
        (invoke("f", a="1").replace("</invoke>", ""), [SYNTAX]),
        (invoke("f").replace('">', ""), [SYNTAX]),
        (invoke("f", a="1").replace("</invoke>", '<parameter name="a">2</parameter></invoke>'), [SYNTAX]),
    ],
)
def test_minimax_m2_calls_have_a_status(inner: str, statuses: list[ToolCallStatus]) -> None:
    parsed = M2.parse(f"<minimax:tool_call>{inner}</minimax:tool_call>")
    assert [call.status for call in parsed.tool_calls] == statuses


def test_values_have_the_types_of_the_tool_that_is_called() -> None:
    tools = [tool("g", a={"type": "integer"}), tool("f", a={"type": "string"})]
    text = "<function=f><parameter=a>1</parameter></function>"
    assert QWEN.parse(f"<tool_call>{text}</tool_call>", tools=tools).tool_calls[0].arguments == {"a": "1"}
    assert GLM.parse("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", tools=tools).tool_calls[
        0
    ].arguments == {"a": "1"}
    text = f"<minimax:tool_call>{invoke('f', a='1')}{invoke('g', a='1')}</minimax:tool_call>"
    assert [call.arguments for call in M2.parse(text, tools=tools).tool_calls] == [{"a": "1"}, {"a": 1}]


@pytest.mark.parametrize(
    ("schema", "value"),
    [({"type": "string", "default": None}, None), ({"type": "string"}, "null"), ({"type": ["string", "null"]}, None)],
)
def test_a_null_of_glm_is_no_text_if_the_default_of_the_string_is_null(schema: dict[str, Any], value: Any) -> None:
    text = "<tool_call>f<arg_key>city</arg_key><arg_value>null</arg_value></tool_call>"
    (call,) = GLM.parse(text, tools=[tool("f", city=schema)]).tool_calls
    assert call.arguments == {"city": value}
