"""Formats with tags of their own: Seed-OSS, Hunyuan 3, DeepSeek V3.2, MiniCPM5, MiniMax M3 and Kimi K3."""

from typing import Any

import pytest

from support.parsing import FormatOnTokenizer, tool
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.formats import DEEPSEEK_V32, HUNYUAN3, KIMI_K3, MINICPM5, MINIMAX_M3, SEED

OK, SYNTAX, NAMELESS = ToolCallStatus.OK, ToolCallStatus.INVALID_SYNTAX, ToolCallStatus.MISSING_NAME
UNCLOSED, JSON = ToolCallStatus.UNCLOSED, ToolCallStatus.INVALID_JSON
ANY_TOOL = tool(
    "f",
    text={"type": "string"},
    list={"type": "array"},
    map={"type": "object"},
    flag={"type": "boolean"},
    none={"type": "null"},
    many={"type": ["array", "string"]},
)

ON_SEED = FormatOnTokenizer(SEED, control=("<seed:tool_call>", "</seed:tool_call>"))
ON_HUNYUAN = FormatOnTokenizer(HUNYUAN3, control=("<tool_call:opensource>", "</tool_call:opensource>"))
ON_DSML = FormatOnTokenizer(DEEPSEEK_V32, control=("｜DSML｜",))
ON_MINICPM = FormatOnTokenizer(MINICPM5)
N = "]<]minimax[>["
ON_M3 = FormatOnTokenizer(MINIMAX_M3, control=(N,))
ON_K3 = FormatOnTokenizer(KIMI_K3, control=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"))


def test_seed_writes_lists_and_objects_as_python_does() -> None:
    values = {"text": "['a']", "list": "['it\\'s', None]", "map": "{'a': True, 'b': [1.5]}", "flag": "False"}
    inner = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in {**values, "none": "None"}.items())
    text = f"<seed:tool_call>\n<function=f>\n{inner}</function>\n</seed:tool_call>"
    (call,) = ON_SEED.parse(text, tools=(ANY_TOOL,)).tool_calls
    expected = {"text": "['a']", "list": ["it's", None], "map": {"a": True, "b": [1.5]}, "flag": False, "none": None}
    assert (call.status, call.arguments) == (OK, expected)


@pytest.mark.parametrize(
    "value", ["[a]", "[1, 2", "{'a': set()}", "[f(x=1)]", "['a' for a in b]", "{1: 2}", "__import__('os')"]
)
def test_what_is_no_literal_stays_text_and_nothing_is_executed(value: str) -> None:
    text = f"<seed:tool_call><function=f><parameter=list>{value}</parameter></function></seed:tool_call>"
    assert ON_SEED.parse(text, tools=(ANY_TOOL,)).tool_calls[0].arguments == {"list": value}


def test_python_is_read_without_a_schema_only_in_formats_that_write_it() -> None:
    inner = "<parameter=a>{'x': None}</parameter><parameter=b>None</parameter><parameter=c>x, y</parameter>"
    text = f"<seed:tool_call><function=f>{inner}</function></seed:tool_call>"
    assert ON_SEED.parse(text).tool_calls[0].arguments == {"a": {"x": None}, "b": "None", "c": "x, y"}
    parameter = '<｜DSML｜parameter name="a">[None]</｜DSML｜parameter>'
    text = dsml(f'<｜DSML｜invoke name="f">{parameter}</｜DSML｜invoke>')
    assert ON_DSML.parse(text).tool_calls[0].arguments == {"a": "[None]"}


def test_a_value_may_contain_the_tag_that_ends_it() -> None:
    inner = "<parameter=a>x</parameter> y</parameter>\n<parameter=b>2</parameter>"
    text = f"<seed:tool_call><function=f>{inner}</function></seed:tool_call>"
    assert ON_SEED.parse(text).tool_calls[0].arguments == {"a": "x</parameter> y", "b": 2}
    text = text.replace("</function>", "oops</function>")
    assert ON_SEED.parse(text).tool_calls[0].status is SYNTAX


@pytest.mark.parametrize(
    ("inner", "status"),
    [
        ("f<tool_sep:opensource>", OK),
        ("f", SYNTAX),
        ("<tool_sep:opensource>", NAMELESS),
        ("f<tool_sep:opensource><arg_key:opensource>a</arg_key:opensource>", SYNTAX),
        ("f<tool_sep:opensource>oops", SYNTAX),
    ],
)
def test_hunyuan_calls_have_a_status(inner: str, status: ToolCallStatus) -> None:
    text = f"<tool_calls:opensource>\n<tool_call:opensource>{inner}</tool_call:opensource>\n</tool_calls:opensource>"
    parsed = ON_HUNYUAN.parse(f"so{text}")
    assert [call.status for call in parsed.tool_calls] == [status]
    assert (parsed.content, parsed.tool_calls[0].raw) == ("so", inner)


def dsml(inner: str) -> str:
    return f"<｜DSML｜function_calls>\n{inner}\n</｜DSML｜function_calls>"


def test_dsml_says_which_values_are_strings() -> None:
    parameters = "".join(
        f'<｜DSML｜parameter name="{key}"{kind}>{value}</｜DSML｜parameter>\n'
        for key, kind, value in (
            ("a", ' string="true"', "5"),
            ("b", ' string="false"', '[1, {"x": null}]'),
            ("c", ' string="false"', "five"),
            ("text", "", "5"),
            ("list", "", "[1]"),
        )
    )
    text = dsml(f'<｜DSML｜invoke name="f">\n{parameters}</｜DSML｜invoke>')
    (call,) = ON_DSML.parse(text, tools=(ANY_TOOL,)).tool_calls
    assert call.arguments == {"a": "5", "b": [1, {"x": None}], "c": "five", "text": "5", "list": [1]}


def test_dsml_calls_have_a_status_and_their_own_spans() -> None:
    call = '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>'
    calls = dsml(f"{call}\n{call}\noops")
    parsed = ON_DSML.parse(f"<think>hm</think>so\n\n{calls}")
    assert [c.status for c in parsed.tool_calls] == [OK, OK, SYNTAX]
    assert (parsed.reasoning, parsed.content, parsed.tool_calls[2].raw) == ("hm", "so", "oops\n")
    assert [c.status for c in ON_DSML.parse(dsml(call)[:-5]).tool_calls] == [UNCLOSED]


def test_tags_whose_control_token_is_only_spelled_are_text() -> None:
    text = dsml('<｜DSML｜invoke name="f">\n</｜DSML｜invoke>')
    parsed = ON_DSML.parser.parse(ON_DSML.spelled(text))
    assert (parsed.content, parsed.tool_calls) == (text, ())
    (half, rest) = text.split("</｜DSML｜invoke>")
    parsed = ON_DSML.parser.parse([*ON_DSML.ids(half), *ON_DSML.spelled("</｜DSML｜invoke>"), *ON_DSML.ids(rest)])
    assert [call.status for call in parsed.tool_calls] == [SYNTAX]


def test_minicpm_values_with_tags_are_in_cdata() -> None:
    value = 'a </param></function> & <function name="g"> ]] <![CDATA[ b'
    text = f'so <function name="f"><param name="a"><![CDATA[{value}]]></param><param name="b">5</param></function>'
    parsed = ON_MINICPM.parse(text)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("f", {"a": value, "b": 5})]
    assert parsed.content == "so"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ('<function name="f"></function>', OK),
        ('<function name=""></function>', NAMELESS),
        ('<function name="f"', UNCLOSED),
        ('<function name="f"><param name="a"><![CDATA[x</param></function>', UNCLOSED),
        ('<function name="f"><param name="a">1</function>', SYNTAX),
        ('<function name="f">x</function>', SYNTAX),
        ('<function name="f</function>', SYNTAX),
    ],
)
def test_minicpm_calls_have_a_status(text: str, status: ToolCallStatus) -> None:
    (call,) = ON_MINICPM.parse(text).tool_calls
    assert (call.status, call.full_text) == (status, text)


def m3(inner: str) -> str:
    return f"{N}<tool_call>\n{inner}\n{N}</tool_call>".replace("#", N)


M3_TOOL = tool(
    "f",
    text={"type": "string"},
    tags={"type": "array", "items": {"type": "string"}},
    tree={"$ref": "#/$defs/Tree"},
    map={"type": "object", "additionalProperties": {"type": "string"}},
    none={"type": ["null", "integer"]},
)
M3_TOOL["function"]["parameters"]["$defs"] = {
    "Tree": {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
    }
}


@pytest.mark.parametrize(
    ("elements", "arguments"),
    [
        ("#<text>5#</text>", {"text": "5"}),
        ("#<text> a\n<b> #</text>", {"text": " a\n<b> "}),
        ("#<tags>#<item>5#</item>#<item>x#</item>#</tags>", {"tags": ["5", "x"]}),
        (
            "#<tags>#</tags>#<tree>#</tree>#<none>#</none>#<text>#</text>",
            {"tags": [], "tree": {}, "none": None, "text": ""},
        ),
        (
            "#<tree>#<n>1#</n>#<kids>#<item>#<n>2#</n>#<kids>#</kids>#</item>#</kids>#</tree>",
            {"tree": {"n": 1, "kids": [{"n": 2, "kids": []}]}},
        ),
        ("#<map>#<item>1#</item>#</map>", {"map": {"item": "1"}}),
        ("#<odd>#<item>1#</item>#<item>true#</item>#</odd>", {"odd": [1, True]}),
        ("#<odd>#<a>1#</a>\n#<b>x#</b>#</odd>", {"odd": {"a": 1, "b": "x"}}),
    ],
)
def test_minimax_m3_elements_are_values_by_the_schema(elements: str, arguments: dict[str, Any]) -> None:
    (call,) = ON_M3.parse(m3(f'#<invoke name="f">{elements}#</invoke>'), tools=(M3_TOOL,)).tool_calls
    assert (call.status, call.arguments) == (OK, arguments)


@pytest.mark.parametrize(
    ("inner", "status"),
    [
        ('#<invoke name="">#</invoke>', NAMELESS),
        ('#<invoke name="f">#<a>1#</a>', SYNTAX),
        ('#<invoke name="f">#<a>1#</b>#</invoke>', SYNTAX),
        ('#<invoke name="f">#<a>x#<b>1#</b>#</a>#</invoke>', SYNTAX),
        ('#<invoke name="f">#<a>1#</a>#<a>2#</a>#</invoke>', SYNTAX),
        ('#<invoke name="f">' + "#<a>" * 99 + "#</a>" * 99 + "#</invoke>", SYNTAX),
        ("oops", SYNTAX),
    ],
)
def test_minimax_m3_calls_have_a_status(inner: str, status: ToolCallStatus) -> None:
    (call,) = ON_M3.parse(m3(inner)).tool_calls
    assert (call.status, call.raw.strip()) == (status, inner.replace("#", N).strip())


def test_a_turn_of_minimax_m3_without_reasoning_begins_with_its_end() -> None:
    assert ON_M3.parse("</mm:think>so </mm:think>").content == "so </mm:think>"
    parsed = ON_M3.parse("<mm:think>hm</mm:think>so</mm:think>")
    assert (parsed.reasoning, parsed.content) == ("hm", "so</mm:think>")


def k3(tag: str, inner: str) -> str:
    return f"<|open|>{tag}<|sep|>{inner}<|close|>{tag.split()[0]}<|sep|>"


def test_a_turn_of_kimi_k3_is_elements() -> None:
    arguments = k3('argument key="a&quot;b" type="number"', "1") + k3('argument key="c" type="string"', "2")
    arguments += k3('argument key="d" type="array"', "[null]")
    tools = k3("tools", k3('call tool="f" index="1"', arguments))
    text = f"hm<|close|>think<|sep|>{k3('response', ' so ')}{tools}"
    parsed = ON_K3.parse(f"{text}<|close|>message<|sep|><|end_of_msg|>", reasoning_opened=True)
    assert (parsed.reasoning, parsed.content) == ("hm", " so ")
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("f", {'a"b': 1, "c": "2", "d": [None]})]


@pytest.mark.parametrize(
    ("inner", "status", "arguments"),
    [
        (k3('json type="object"', '{"a": 1}'), OK, {"a": 1}),
        (k3('json type="object"', '{"a": 1'), JSON, {}),
        (k3('json type="object"', "{}") + "x", SYNTAX, {}),
        ("x", SYNTAX, {}),
        (k3('argument key="a" type="number"', "1") * 2, SYNTAX, {}),
        ("", OK, {}),
    ],
)
def test_kimi_k3_calls_have_a_status(inner: str, status: ToolCallStatus, arguments: dict[str, Any]) -> None:
    (call,) = ON_K3.parse(k3("tools", k3('call tool="f" index="1"', inner))).tool_calls
    assert (call.status, call.arguments) == (status, arguments)


def test_kimi_k3_elements_that_are_only_spelled_are_text() -> None:
    tag = "<|close|>response<|sep|>"
    ids = [*ON_K3.ids("<|open|>response<|sep|>a"), *ON_K3.spelled(tag), *ON_K3.ids(f"b{tag}")]
    assert ON_K3.parser.parse(ids).content == f"a{tag}b"
