"""Calls written in Python are read as literals; nothing is run, and nothing takes long."""

import time

import pytest

from support.parsing import FormatOnTokenizer
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import CallBody
from unbroken.rendering.parsing.formats import LFM2, PYTHONIC
from unbroken.rendering.parsing.syntax.python_calls import MAX_CHARS, read_python_calls

PYTHON = FormatOnTokenizer(PYTHONIC, control=("<|python_start|>", "<|python_end|>"))
LIQUID = FormatOnTokenizer(LFM2, control=("<|tool_call_start|>", "<|tool_call_end|>"))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("f()", {}),
        (
            "f(a=1, b=-2.5, c='x', d=\"y\", e=None, g=True)",
            {"a": 1, "b": -2.5, "c": "x", "d": "y", "e": None, "g": True},
        ),
        ("f(a=[1, {'k': [True]}])", {"a": [1, {"k": [True]}]}),
        ('f(a={"t": true, "f": false, "n": null})', {"a": {"t": True, "f": False, "n": None}}),
        ("f(a='é今😀')", {"a": "é今😀"}),
        (r"f(a='it\'s', b='\u00e9\n')", {"a": "it's", "b": "é\n"}),
        (r'f(a="\ud83d\ude00")', {"a": "😀"}),
        ("f(a='two\nlines', b='C:\\new\\d\\users')", {"a": "two\nlines", "b": "C:\new\\d\\users"}),
        ("f(from='x', class_=1, größe=2)", {"from": "x", "class_": 1, "größe": 2}),
        ("f(\n  a = 1,\n)", {"a": 1}),
        ("f(a='g(b=1)', c='x=1')", {"a": "g(b=1)", "c": "x=1"}),
    ],
)
def test_literals_are_read(text: str, arguments: dict[str, object]) -> None:
    for body in (text, f" [{text}]\n"):
        (call,) = read_python_calls(CallBody(text=body), ())
        assert (call.status, call.name, call.arguments) == (ToolCallStatus.OK, "f", arguments)


def test_a_name_need_not_be_one_of_python() -> None:
    calls = read_python_calls(CallBody(text="[get-time(), a.b.c(x=1), import(), ﬁnd()]"), ())
    assert [call.name for call in calls] == ["get-time", "a.b.c", "import", "ﬁnd"]


def test_each_call_has_its_span() -> None:
    text = "[größe(a='é\n'), now() , f(b=[')'])]"
    calls = read_python_calls(CallBody(text=text), ())
    assert [text[slice(*call.span)] for call in calls if call.span] == ["größe(a='é\n')", "now()", "f(b=[')'])"]


@pytest.mark.parametrize(
    "body", ["f(a='x\ny')\nnow()", "\nf(a='x\ny')  \n\n now()\n", "f(a='x\ny'),\nnow()", "f(a='x\ny'), now()"]
)
def test_calls_may_stand_on_lines_without_a_list(body: str) -> None:
    calls = read_python_calls(CallBody(text=body), ())
    assert [(call.name, call.arguments) for call in calls] == [("f", {"a": "x\ny"}), ("now", {})]
    assert [body[slice(*call.span)] for call in calls if call.span] == ["f(a='x\ny')", "now()"]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("f(a=g())", ToolCallStatus.INVALID_ARGUMENTS),
        ("f(a=__import__('os').system('true'))", ToolCallStatus.INVALID_ARGUMENTS),
        ("f(a=[x for x in b])", ToolCallStatus.INVALID_ARGUMENTS),
        ("f(a=lambda: 1)", ToolCallStatus.INVALID_ARGUMENTS),
        ("f(a=1 + 1)", ToolCallStatus.INVALID_ARGUMENTS),
        ("f(a='x' * 99)", ToolCallStatus.INVALID_ARGUMENTS),
        ("f(a={1: 2})", ToolCallStatus.INVALID_ARGUMENTS),
        ("f(a={**b})", ToolCallStatus.INVALID_ARGUMENTS),
        ("f(a=1e999)", ToolCallStatus.INVALID_ARGUMENTS),
        (f"f(a={'9' * 309})", ToolCallStatus.INVALID_ARGUMENTS),
        ("f(a=1j)", ToolCallStatus.INVALID_ARGUMENTS),
        ("f(a=...)", ToolCallStatus.INVALID_ARGUMENTS),
        (r"f(a='\ud800')", ToolCallStatus.INVALID_ARGUMENTS),
        ("f(a=x)", ToolCallStatus.INVALID_ARGUMENTS),
        ("f(1)", ToolCallStatus.INVALID_ARGUMENTS),
        ("f(**{'a': 1})", ToolCallStatus.INVALID_ARGUMENTS),
        ("f(a=1, a=2)", ToolCallStatus.INVALID_ARGUMENTS),
        ("[1]", ToolCallStatus.MISSING_NAME),
        ("f", ToolCallStatus.MISSING_NAME),
        ("(f)(a=1)", ToolCallStatus.MISSING_NAME),
        ("f()()", ToolCallStatus.MISSING_NAME),
        ("(x0)(a=1)", ToolCallStatus.MISSING_NAME),
        ("(n0)(a=1)", ToolCallStatus.INVALID_SYNTAX),
        ("f(a=b'x')", ToolCallStatus.INVALID_SYNTAX),
        ("f(a=f'{x}')", ToolCallStatus.INVALID_SYNTAX),
        ("f(a='it's')", ToolCallStatus.INVALID_SYNTAX),
        ("f(a='x", ToolCallStatus.INVALID_SYNTAX),
        ("f(a=", ToolCallStatus.INVALID_SYNTAX),
        ("f(a=1) # done", ToolCallStatus.INVALID_SYNTAX),
        ("f(a=1é)", ToolCallStatus.INVALID_SYNTAX),
        ("f(a=1if 1else 2)", ToolCallStatus.INVALID_SYNTAX),
        ("f(a=1); g()", ToolCallStatus.INVALID_SYNTAX),
        ("", ToolCallStatus.INVALID_SYNTAX),
        ("\0", ToolCallStatus.INVALID_SYNTAX),
    ],
)
def test_what_is_no_call_of_literals_is_not_run(text: str, status: ToolCallStatus) -> None:
    assert [call.status for call in read_python_calls(CallBody(text=text), ())] == [status]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "f(a=" + "[" * 60 + "]" * 60 + ")",
        "f(a=" + "-" * 100_000 + "1)",
        "f(a=" + "not " * 40_000 + "1)",
        "f(a=" + "1 if 1 else " * 10_000 + "1)",
        "a" * MAX_CHARS,
        "a." * (MAX_CHARS // 2),
        "'" + "\\'" * (MAX_CHARS // 2 - 1),
        "f(a='" + "x" * MAX_CHARS + "')",
        "f(a=" + "9" * 100_000 + ")",
        "f" + " " * (MAX_CHARS - 1),
    ],
    ids=range(11),
)
def test_hostile_texts_are_refused_in_good_time(text: str) -> None:
    started = time.process_time()
    (call,) = read_python_calls(CallBody(text=text), ())
    assert call.status is not ToolCallStatus.OK
    assert time.process_time() - started < 6


def test_a_turn_that_begins_with_a_list_of_calls_is_calls() -> None:
    parsed = PYTHON.parse("[add(a=1), now()]<|im_end|>")
    assert [call.name for call in parsed.tool_calls] == ["add", "now"]
    assert parsed.content == ""
    assert [call.name for call in PYTHON.parse("<|python_start|>[now()]<|python_end|>").tool_calls] == ["now"]


@pytest.mark.parametrize("text", ["[1, 2]", "[a link](https://example.org)", "[", "[]", "[x]"])
def test_a_turn_that_begins_with_another_list_is_content(text: str) -> None:
    parsed = PYTHON.parse(text + "<|im_end|>")
    assert parsed.content == text
    assert parsed.tool_calls == ()


def test_a_call_that_was_cut_is_unclosed() -> None:
    text = "[add(a=1), no"
    assert [call.status for call in PYTHON.parse(text).tool_calls] == [ToolCallStatus.UNCLOSED]
    assert PYTHON.parts(text) == [("tool_call", text)]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("[add(a=1)]", ToolCallStatus.OK),
        ('[{"name": "add", "arguments": {"a": 1}}]', ToolCallStatus.OK),
        ('{"name": "add", "arguments": {"a": 1}}', ToolCallStatus.OK),
        ('[{"name": "add"]', ToolCallStatus.INVALID_JSON),
        ("[add(a=]", ToolCallStatus.INVALID_SYNTAX),
        ("[add(1)]", ToolCallStatus.INVALID_ARGUMENTS),
    ],
)
def test_lfm2_writes_python_or_json(body: str, status: ToolCallStatus) -> None:
    text = f"<think>so</think>Let me see.<|tool_call_start|>{body}<|tool_call_end|> Done.<|im_end|>"
    parsed = LIQUID.parse(text)
    assert (parsed.reasoning, parsed.content) == ("so", "Let me see.\nDone.")
    assert [call.status for call in parsed.tool_calls] == [status]
    assert LIQUID.parse(f"<|tool_call_start|>{body}").tool_calls[0].status is ToolCallStatus.UNCLOSED
