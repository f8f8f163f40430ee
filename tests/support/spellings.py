"""Spellings of calls: how models write a call in each format, the canonical way and the ways that they slip into."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

NAME, ARGUMENTS, KEY, VALUE = "«name»", "«arguments»", "«key»", "«value»"
OTHER_KEYS = {"arguments": "parameters", "parameters": "arguments", "args": "arguments"}
Arguments = Mapping[str, Any] | str
"""Values, or the text in their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a format writes calls."""

    before: str = ""
    call: str
    """One call, with `NAME` and `ARGUMENTS` in their places."""
    between: str = ""
    after: str = ""
    argument: str = ""
    """One argument, with `KEY` and `VALUE`; empty if the arguments are one JSON object."""
    joint: str = ""
    """Between two arguments."""
    write_value: Callable[[Any], str] = json.dumps
    think: tuple[str, str] = ("<think>", "</think>")
    """Around reasoning; two empty texts if the format writes it in another way."""

    def write(self, *calls: tuple[str, Arguments]) -> str:
        """The text of these calls."""
        return self.before + self.between.join(self._write_call(*call) for call in calls) + self.after

    def _write_call(self, name: str, arguments: Arguments) -> str:
        if isinstance(arguments, str):
            text = arguments
        elif self.argument:
            pairs = arguments.items()
            text = self.joint.join(self.write_argument(key, self.write_value(value)) for key, value in pairs)
        else:
            text = json.dumps(arguments)
        return self.call.replace(NAME, name).replace(ARGUMENTS, text)

    def write_argument(self, key: str, value: str) -> str:
        """One argument with this text as its value."""
        return self.argument.replace(KEY, key).replace(VALUE, value)


def _text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _object(name: str = "name", arguments: str = "arguments") -> str:
    return f'{{"{name}": "{NAME}", "{arguments}": {ARGUMENTS}}}'


def _gemma(quote: str) -> Callable[[Any], str]:
    """How Gemma writes values: keys bare, and texts in a token of their own."""

    def write(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{write(each)}" for key, each in value.items()) + "}"
        return "[" + ",".join(map(write, value)) + "]" if isinstance(value, list) else json.dumps(value)

    return write


def _tags(before: str, call: str, between: str, after: str, argument: str, **others: Any) -> Dialect:
    texts = {"before": before, "call": call, "between": between, "after": after, "argument": argument}
    return Dialect(**texts, **{"write_value": _text_or_json, **others})


_CODER = (f"<function={NAME}>\n{ARGUMENTS}</function>\n", f"<parameter={KEY}>\n{VALUE}\n</parameter>\n")
_SEED = (f"<function={NAME}>\n{ARGUMENTS}</function>\n", f"<parameter={KEY}>{VALUE}</parameter>\n")
_INVOKE = (f'<invoke name="{NAME}">\n{ARGUMENTS}</invoke>\n', f'<parameter name="{KEY}">{VALUE}</parameter>\n')
_GLM = (f"{NAME}\n{ARGUMENTS}", f"<arg_key>{KEY}</arg_key>\n<arg_value>{VALUE}</arg_value>\n")
_PYTHON = {"call": f"{NAME}({ARGUMENTS})", "argument": f"{KEY}={VALUE}", "joint": ", ", "write_value": repr}
_DSML = (
    f'<｜DSML｜invoke name="{NAME}">\n{ARGUMENTS}</｜DSML｜invoke>\n',
    f'<｜DSML｜parameter name="{KEY}" string="false">{VALUE}</｜DSML｜parameter>\n',
)
_HY = (
    f"<tool_call:opensource>{NAME}<tool_sep:opensource>\n{ARGUMENTS}</tool_call:opensource>\n",
    f"<arg_key:opensource>{KEY}</arg_key:opensource>\n<arg_value:opensource>{VALUE}</arg_value:opensource>\n",
)
_HARMONY = f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
_KIMI = f"<|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
_DEEPSEEK = f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
_DEEPSEEK_V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
_SECTION = {"before": "<｜tool▁calls▁begin｜>", "after": "<｜tool▁calls▁end｜>"}
_NO_THINK = ("", "")
_M3 = "]<]minimax[>["

DIALECTS: dict[str, Dialect] = {
    "hermes": Dialect(
        before="<tool_call>\n", call=_object(), between="\n</tool_call>\n<tool_call>\n", after="\n</tool_call>"
    ),
    "qwen3_coder": _tags("<tool_call>\n", _CODER[0], "</tool_call>\n<tool_call>\n", "</tool_call>", _CODER[1]),
    "seed": _tags(
        "<seed:tool_call>\n",
        _SEED[0],
        "</seed:tool_call>\n<seed:tool_call>\n",
        "</seed:tool_call>",
        _SEED[1],
        think=("<seed:think>", "</seed:think>"),
    ),
    "glm": _tags("<tool_call>", _GLM[0], "</tool_call>\n<tool_call>", "</tool_call>", _GLM[1]),
    "glm, on one line": _tags(
        "<tool_call>",
        f"{NAME}{ARGUMENTS}",
        "</tool_call><tool_call>",
        "</tool_call>",
        f"<arg_key>{KEY}</arg_key><arg_value>{VALUE}</arg_value>",
    ),
    "hunyuan3": _tags(
        "<tool_calls:opensource>\n",
        _HY[0],
        "",
        "</tool_calls:opensource>",
        _HY[1],
        think=("<think:opensource>", "</think:opensource>"),
    ),
    "minimax_m1": Dialect(before="<tool_calls>\n", call=_object(), between="\n", after="\n</tool_calls>"),
    "minimax_m1, a list": Dialect(before="<tool_calls>[", call=_object(), between=", ", after="]</tool_calls>"),
    "minimax_m2": _tags("<minimax:tool_call>\n", _INVOKE[0], "", "</minimax:tool_call>", _INVOKE[1]),
    "minimax_m3": _tags(
        f"{_M3}<tool_call>\n",
        f'{_M3}<invoke name="{NAME}">{ARGUMENTS}{_M3}</invoke>\n',
        "",
        f"{_M3}</tool_call>",
        f"{_M3}<{KEY}>{VALUE}{_M3}</{KEY}>",
        think=("<mm:think>", "</mm:think>"),
    ),
    "minicpm5": _tags(
        "",
        f'<function name="{NAME}">{ARGUMENTS}</function>',
        "\n",
        "",
        f'<param name="{KEY}">{VALUE}</param>',
    ),
    "deepseek_v32": _tags("<｜DSML｜function_calls>\n", _DSML[0], "", "</｜DSML｜function_calls>", _DSML[1]),
    "deepseek_v4": _tags("<｜DSML｜tool_calls>\n", _DSML[0], "", "</｜DSML｜tool_calls>", _DSML[1]),
    "deepseek": Dialect(**_SECTION, call=_DEEPSEEK),
    "deepseek, fenced": Dialect(**_SECTION, call=_DEEPSEEK_V3, between="\n"),
    "kimi_k2": Dialect(before="<|tool_calls_section_begin|>", call=_KIMI, after="<|tool_calls_section_end|>"),
    "kimi_k3": _tags(
        "<|open|>tools<|sep|>",
        f'<|open|>call tool="{NAME}" index="1"<|sep|>{ARGUMENTS}<|close|>call<|sep|>',
        "",
        "<|close|>tools<|sep|>",
        f'<|open|>argument key="{KEY}" type="number"<|sep|>{VALUE}<|close|>argument<|sep|>',
        think=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
    "harmony": Dialect(
        call=_HARMONY, between="<|start|>assistant", think=("<|channel|>analysis<|message|>", "<|end|>")
    ),
    "harmony, the recipient first": Dialect(
        call=f" to=functions.{NAME}<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        between="<|start|>assistant",
        think=_NO_THINK,
    ),
    "muse": _tags(
        "",
        f' to={NAME}<|message|><atem:function_calls>\n<atem:invoke name="{NAME}">\n{ARGUMENTS}</atem:invoke>\n'
        "</atem:function_calls>",
        "<|eom|><|start|>assistant",
        "<|eot|>",
        f'<atem:parameter name="{KEY}">{VALUE}</atem:parameter>\n',
        think=_NO_THINK,
    ),
    "solar": Dialect(
        before="<|tool_calls|>",
        call=f"<|tool_call:begin|>a1<|tool_call:name|>{NAME}<|tool_call:args|>{ARGUMENTS}<|tool_call:end|>",
        after="<|calls|>",
        think=("<|think|>", "<|end|><|begin|>assistant"),
    ),
    "inkling": Dialect(
        call=f"{NAME}<|content_invoke_tool_json|>" + _object("name", "args") + "<|end_message|>",
        between="<|message_model|>",
        think=_NO_THINK,
    ),
    "functionary": Dialect(call=f"{NAME}\n{ARGUMENTS}", between=">>>", think=_NO_THINK),
    "functionary_v31": Dialect(call=f"<function={NAME}>{ARGUMENTS}</function>", think=_NO_THINK),
    "gemma4": _tags(
        "<|tool_call>",
        f"call:{NAME}{{{ARGUMENTS}}}",
        "<tool_call|><|tool_call>",
        "<tool_call|>",
        f"{KEY}:{VALUE}",
        joint=",",
        write_value=_gemma('<|"|>'),
        think=("<|channel>thought\n", "<channel|>"),
    ),
    "function_gemma": _tags(
        "<start_function_call>",
        f"call:{NAME}{{{ARGUMENTS}}}",
        "<end_function_call><start_function_call>",
        "<end_function_call>",
        f"{KEY}:{VALUE}",
        joint=",",
        write_value=_gemma("<escape>"),
        think=_NO_THINK,
    ),
    "lfm2": Dialect(before="<|tool_call_start|>[", between=", ", after="]<|tool_call_end|>", **_PYTHON),
    "pythonic": Dialect(before="[", between=", ", after="]", think=_NO_THINK, **_PYTHON),
    "pythonic, between tokens": Dialect(
        before="<|python_start|>[", between=", ", after="]<|python_end|>", think=_NO_THINK, **_PYTHON
    ),
    "tool_code": Dialect(before="```tool_code\n", between="\n", after="\n```", think=_NO_THINK, **_PYTHON),
    "olmo3": Dialect(before="<function_calls>\n", between="\n", after="\n</function_calls>", **_PYTHON),
    "llama3": Dialect(call=_object("name", "parameters"), between="; ", think=_NO_THINK),
    "llama3, behind its token": Dialect(
        before="<|python_tag|>", call=_object("name", "parameters"), between="; ", think=_NO_THINK
    ),
    "llama4": Dialect(before="<|python_start|><|python_end|>", call=_object("name", "parameters"), think=_NO_THINK),
    "xlam": Dialect(before="[", call=_object(), between=", ", after="]", think=_NO_THINK),
    "granite": Dialect(before="<|tool_call|>[", call=_object(), between=", ", after="]"),
    "granite, as text": Dialect(before="<tool_call>[", call=_object(), between=", ", after="]"),
    "internlm": Dialect(
        before="<|action_start|><|plugin|>\n",
        call=_object(),
        between="<|action_end|><|action_start|><|plugin|>\n",
        after="<|action_end|>",
    ),
    "internlm, a space between": Dialect(
        before="<|action_start|> <|plugin|>\n", call=_object("name", "parameters"), after="<|action_end|>"
    ),
    "mistral": Dialect(before="[TOOL_CALLS] [", call=_object(), between=", ", after="]", think=("[THINK]", "[/THINK]")),
    "mistral, a call behind each": Dialect(
        before="[TOOL_CALLS]",
        call=f"{NAME}[ARGS]{ARGUMENTS}",
        between="[TOOL_CALLS]",
        think=("[THINK]", "[/THINK]"),
    ),
    "cohere2": Dialect(
        before="<|START_ACTION|>[\n",
        call='{"tool_call_id": "0", ' + _object("tool_name", "parameters")[1:],
        between=",\n",
        after="\n]<|END_ACTION|>",
        think=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "cohere": Dialect(
        before="Action: ```json\n[",
        call=_object("tool_name", "parameters"),
        between=",\n",
        after="]\n```",
        think=_NO_THINK,
    ),
    "apertus": Dialect(
        before="<|tools_prefix|>[",
        call=f'{{"{NAME}": {ARGUMENTS}}}',
        between=", ",
        after="]<|tools_suffix|>",
        think=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "gigachat": Dialect(before="<|function_call|>", call=_object(), between="<|function_call|>"),
    "gigachat3": Dialect(
        before="function call<|role_sep|>\n", call=_object(), between="<|message_sep|>\n\nfunction call<|role_sep|>\n"
    ),
    "nemotron": Dialect(before="<TOOLCALL>[", call=_object(), between=", ", after="]</TOOLCALL>"),
    "phi": Dialect(before="<|tool_call|>[", call=_object(), between=", ", after="]<|/tool_call|>"),
    "phi, without tokens": Dialect(before="functools[", call=_object(), between=", ", after="]"),
}
"""By the format's name; more than one dialect of a format have a comma and a word behind it."""

_ADD = ("add", {"a": 1})
_NOW = ("now", {})
_OBJECT = {"k": [1, {"x": None}], "t": True}


def spell(dialect: Dialect) -> Iterator[tuple[str, str]]:
    """The spellings of a dialect: what is special, and the text."""
    text = dialect.write(_ADD)
    yield "canonical", text
    yield "two calls", dialect.write(_ADD, _NOW)
    yield "no arguments", dialect.write(_NOW)
    yield "a nested value", dialect.write(("add", {"o": _OBJECT}))
    yield "text before it", f"Let me see. {text}"
    yield "a line before it", f"Let me see.\n{text}"
    yield "text behind it", f"{text} Done."
    yield "a line behind it", f"{text}\nDone."
    yield "white space around it", f"\n\n{text}\n"
    yield "a text", dialect.write(("add", {"s": "it's so"}))
    yield "an unknown function", dialect.write(("other", {"a": 1}))
    yield "spaces around the name", dialect.write((" add ", {"a": 1}))
    yield from _spell_delimiters(dialect)
    yield from _spell_json(dialect) if ARGUMENTS in dialect.call and not dialect.argument else ()
    yield from _spell_values(dialect) if dialect.argument else ()
    opening, closing = dialect.think
    if opening:
        yield "behind reasoning", f"{opening}hm{closing}{text}"
        yield "in reasoning that is not closed", f"{opening}hm{text}"
        yield "in reasoning that it closes", f"{opening}hm{text}{closing}"


def _spell_delimiters(dialect: Dialect) -> Iterator[tuple[str, str]]:
    parts = ("before", "call", "between", "after", "argument")
    flat = replace(dialect, **{part: getattr(dialect, part).replace("\n", "") for part in parts})
    if flat != dialect:
        yield "without line breaks", flat.write(_ADD, _NOW)
    wide = replace(dialect, before=f"{dialect.before}\n ", after=f" \n{dialect.after}")
    yield "white space inside", wide.write(_ADD)
    if dialect.after:
        yield "no end mark", replace(dialect, after="").write(_ADD)
        yield "no end mark behind two", replace(dialect, after="").write(_ADD, _NOW)
    if dialect.after.startswith("]"):
        yield "no bracket at the end", replace(dialect, after=dialect.after[1:]).write(_ADD)
    if dialect.before.endswith("["):
        bare = replace(dialect, before=dialect.before[:-1], after=dialect.after.lstrip("]"))
        yield "no list around it", bare.write(_ADD)
    if dialect.before:
        yield "the opening twice", dialect.before + dialect.write(_ADD)
    closings = re.findall(r"</[^>]+>", dialect.call)
    if closings:
        broken = dialect.call.replace(closings[-1], "")
        yield "no inner end mark", replace(dialect, call=broken).write(_ADD)


def _spell_json(dialect: Dialect) -> Iterator[tuple[str, str]]:
    for label, arguments in (
        ("compact", '{"a":1}'),
        ("on lines", '{\n  "a": 1\n}'),
        ("arguments as text", json.dumps('{"a": 1}')),
        ("arguments null", "null"),
        ("arguments empty text", '""'),
        ("arguments a list", '[{"a": 1}]'),
        ("arguments a word", "oops"),
        ("Python's quotes", "{'a': 1}"),
        ("Python's words", '{"a": True}'),
        ("a comma too many", '{"a": 1,}'),
        ("a line break in a string", '{"s": "two\nlines"}'),
        ("an escape that is none", '{"s": "a\\_b"}'),
        ("a key twice", '{"a": 1, "a": 2}'),
        ("NaN", '{"a": NaN}'),
        ("a bracket missing", '{"a": 1'),
        ("a bracket too many", '{"a": 1}}'),
        ("a comment", '{"a": 1 /* one */}'),
    ):
        yield label, dialect.write(("add", arguments))
    found = re.search(rf', "(\w+)": {ARGUMENTS}', dialect.call)
    if found is None:
        return
    key = found[1]
    yield "no arguments at all", replace(dialect, call=dialect.call.replace(found[0], "")).write(_NOW)
    other = dialect.call.replace(f'"{key}": ', f'"{OTHER_KEYS[key]}": ')
    yield "the other key of arguments", replace(dialect, call=other).write(_ADD)
    more = dialect.call.replace('{"', '{"id": "call_1", "type": "function", "', 1)
    yield "an id and a type", replace(dialect, call=more).write(_ADD)
    start = dialect.call.index('{"')
    nested = f'{dialect.call[:start]}{{"type": "function", "function": {dialect.call[start:]}}}'
    yield "inside a function", replace(dialect, call=nested).write(_ADD)
    backwards = dialect.call.replace(f'"{NAME}"{found[0]}', f'{ARGUMENTS}, "name": "{NAME}"').replace(
        '"name": «arguments»', f'"{key}": {ARGUMENTS}'
    )
    if '"name": "«name»"' in backwards:
        yield "the name behind", replace(dialect, call=backwards).write(_ADD)


def _spell_values(dialect: Dialect) -> Iterator[tuple[str, str]]:
    for label, key, value in (
        ("a number as text", "a", "one"),
        ("a number in quotes", "a", '"1"'),
        ("a value with white space", "a", " 1 "),
        ("null", "a", "null"),
        ("None", "a", "None"),
        ("true", "t", "true"),
        ("True", "t", "True"),
        ("a text without quotes", "s", "it's so"),
        ("a text in quotes", "s", '"so"'),
        ("a text in single quotes", "s", "'so'"),
        ("lines", "s", "two\nlines"),
        ("a text with a tag", "s", "a <b>c</b>"),
        ("an empty text", "s", ""),
        ("JSON in a text", "s", '{"k": [1]}'),
        ("an object on lines", "o", '{\n  "k": 1\n}'),
        ("an object in Python", "o", "{'k': True}"),
        ("half an object", "o", '{"k": '),
        ("an unknown argument", "z", "1"),
    ):
        yield label, dialect.write(("add", dialect.write_argument(key, value)))
    one = dialect.write_argument("a", "1")
    yield "an argument twice", dialect.write(("add", one + dialect.joint + one))
    yield (
        "a comma behind the last" if dialect.joint else "text behind the last",
        dialect.write(("add", one + (dialect.joint or "so "))),
    )
    yield "arguments as JSON", dialect.write(("add", '{"a": 1}'))
    yield "an argument without a name", dialect.write(("add", "1"))
    end = dialect.argument.partition(VALUE)[2].strip()
    if end:
        yield "no end of an argument", dialect.write(("add", one.replace(end, "")))
