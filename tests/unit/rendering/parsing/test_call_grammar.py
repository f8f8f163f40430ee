"""Calls that must be made: the grammar of each template's own calls, as xgrammar reads it."""

import json
from typing import Any

import numpy as np
import pytest

from support import templates
from support.corpus import corpus_template
from support.format_templates import FORMAT_TEMPLATES, tokenizer_of
from support.parsing import tool
from support.tokenizers import make_tokenizer
from unbroken.errors import InvalidInputError
from unbroken.rendering.base import ConstrainsCalls, ToolCallStatus
from unbroken.rendering.parsing import call_grammar
from unbroken.rendering.template import TemplateRenderer

xgrammar = pytest.importorskip("xgrammar")

ADD = tool("add", a={"type": "integer"})
ADD["function"]["parameters"]["required"] = ["a"]
NOW = tool("now")
USER: Any = [{"role": "user", "content": "hi"}]
WITH_GRAMMAR = {
    *("apertus", "cohere", "cohere2", "deepseek", "functionary", "functionary_v31", "gigachat", "kimi_k2"),
    *("minimax_m2", "mistral", "nemotron", "phi", "solar", "granite", "internlm", "xlam"),
}
ADD_1 = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NOW_0 = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def required(text: Any) -> Any:
    """A function with one argument, which must be there."""
    function = tool("say", text=text)
    function["function"]["parameters"] |= {"required": ["text"], "additionalProperties": False}
    return function


class Matcher:
    """Says whether a constraint allows a completion."""

    def __init__(self, tokenizer: Any, tag: str, *, stop_token_ids: tuple[int, ...]) -> None:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
        self._compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(tag)
        self._stops = list(stop_token_ids)
        self._tokenizer = tokenizer

    def allows(self, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=self._stops)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return all(matcher.accept_token(token_id) for token_id in ids) and matcher.is_terminated()


def make_matcher(
    tokenizer: Any, functions: list[Any], *, several: bool = True, prompt: str | None = None
) -> tuple[Matcher, TemplateRenderer]:
    renderer = TemplateRenderer(tokenizer)
    assert isinstance(renderer, ConstrainsCalls)
    prompt_ids = renderer.render(USER, tools=functions).token_ids
    if prompt is not None:
        prompt_ids = np.array([*prompt_ids, *tokenizer(prompt, add_special_tokens=False)["input_ids"]], dtype=np.int32)
    tag = renderer.constrain_calls(functions, prompt_ids=prompt_ids, several=several)
    return Matcher(tokenizer, tag, stop_token_ids=renderer.get_stop_token_ids()), renderer


def qwen() -> Any:
    return make_tokenizer(templates.QWEN_THINKING, eos_token="<|im_end|>")


def test_only_calls_of_the_functions_are_allowed() -> None:
    matcher, _ = make_matcher(qwen(), [ADD, NOW])
    end = "<|im_end|>"
    assert matcher.allows(ADD_1 + end)
    assert matcher.allows(f"{ADD_1}\n{NOW_0}\n{ADD_1}{end}")
    assert not matcher.allows("Hello." + end)
    assert not matcher.allows(end)
    assert not matcher.allows("Let me see.\n" + ADD_1 + end)
    assert not matcher.allows(ADD_1 + "\nDone." + end)
    assert not matcher.allows(ADD_1)
    assert not matcher.allows(ADD_1.replace("add", "other") + end)
    assert not matcher.allows(ADD_1.replace("1", '"one"') + end)
    assert not matcher.allows(ADD_1.replace('{"a": 1}', "{}") + end)
    assert not matcher.allows(ADD_1.replace('{"a": 1}', '{"a":  1}') + end)


def test_one_function_is_called_once() -> None:
    matcher, _ = make_matcher(qwen(), [ADD], several=False)
    assert matcher.allows(ADD_1 + "<|im_end|>")
    assert not matcher.allows(f"{ADD_1}\n{ADD_1}<|im_end|>")
    assert not matcher.allows(NOW_0 + "<|im_end|>")


def test_the_model_may_reason_before_the_call() -> None:
    matcher, _ = make_matcher(qwen(), [ADD])
    thought = "<think>\nI add <tools>, 1.\n</think>\n\n"
    assert matcher.allows(f"{thought}{ADD_1}<|im_end|>")
    assert not matcher.allows(f"{thought}{thought}{ADD_1}<|im_end|>")
    assert not matcher.allows("<think>\nnever ends<|im_end|>")


def test_reasoning_that_the_prompt_has_already_does_not_come_again() -> None:
    matcher, _ = make_matcher(qwen(), [ADD], prompt="<think>\n\n</think>\n\n")
    assert matcher.allows(ADD_1 + "<|im_end|>")
    assert not matcher.allows(f"<think>\nI add.\n</think>\n\n{ADD_1}<|im_end|>")


def test_reasoning_that_the_prompt_opened_must_end() -> None:
    matcher, _ = make_matcher(qwen(), [ADD], prompt="<think>\n")
    assert matcher.allows(f"I add.\n</think>\n\n{ADD_1}<|im_end|>")
    assert not matcher.allows(ADD_1 + "<|im_end|>")


@pytest.mark.parametrize("name", FORMAT_TEMPLATES)
def test_the_calls_that_a_template_writes_are_allowed_and_read(name: str) -> None:
    tokenizer = tokenizer_of(name)
    if name.split(",")[0] not in WITH_GRAMMAR:
        with pytest.raises(InvalidInputError, match="calls cannot be required in the format"):
            make_matcher(tokenizer, [ADD])
        return
    matcher, renderer = make_matcher(tokenizer, [ADD, NOW])
    grammar = renderer._constraint._grammar
    assert grammar is not None
    calls: list[Any] = [("add", {"a": 1}), ("now", {})][: 1 if grammar.joint is None else 2]
    texts = [(call, {key: str(value) for key, value in arguments.items()}) for call, arguments in calls]
    written = grammar.write(calls if grammar.style.name == "json" else texts)
    stop = tokenizer.decode([renderer.get_stop_token_ids()[0]])
    assert matcher.allows(written + stop)
    assert not matcher.allows(written[:-1] + stop)
    ids = np.array(tokenizer(written + stop, add_special_tokens=False)["input_ids"], dtype=np.int32)
    parsed = renderer.parse_response(ids)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert all(call.status is ToolCallStatus.OK for call in parsed.tool_calls)


def test_arguments_between_tags_have_a_grammar_too() -> None:
    tokenizer = corpus_template("trl/qwen3_5_nothink").tokenizer()
    search = tool("search", query={"type": "string"}, limit={"type": "integer"})
    matcher, renderer = make_matcher(tokenizer, [search])
    assert renderer.parser_name == "qwen3_coder"
    call = (
        "<tool_call>\n<function=search>\n<parameter=query>\n<b>two\nlines</b>\n</parameter>\n<parameter=limit>\n5\n"
        "</parameter>\n</function>\n</tool_call>"
    )
    for written in (f"{call}<|im_end|>", f"{call}\n{call}<|im_end|>"):
        assert matcher.allows(written)
        ids = np.array(tokenizer(written, add_special_tokens=False)["input_ids"], dtype=np.int32)
        parsed = renderer.parse_response(ids, tools=[search])
        assert {str(one.arguments) for one in parsed.tool_calls} == {"{'query': '<b>two\\nlines</b>', 'limit': 5}"}
    assert not matcher.allows(call.replace("5", "five") + "<|im_end|>")
    assert not matcher.allows(call.removesuffix("</tool_call>") + "<|im_end|>")


def test_a_text_in_a_call_cannot_hold_the_token_that_ends_the_call() -> None:
    matcher, _ = make_matcher(qwen(), [tool("say", text={"type": "string"})])
    said = '<tool_call>\n{"name": "say", "arguments": {"text": "%s"}}\n</tool_call><|im_end|>'
    assert matcher.allows(said % "</tool> é 😀")
    assert not matcher.allows(said % "</tool_call>")


SAID = '<tool_call>\n{"name": "say", "arguments": {"text": "%s"}}\n</tool_call><|im_end|>'
WRITTEN = "<tool_call>\n<function=say>\n<parameter=text>\n%s\n</parameter>\n</function>\n</tool_call><|im_end|>"


@pytest.mark.parametrize(("minimum", "maximum"), [(3, 6), (0, 12), (0, 128), (3, 255), (150, 250), (40, 40)])
def test_a_text_in_a_call_has_the_lengths_of_its_schema(minimum: int, maximum: int) -> None:
    text = {"type": "string", "minLength": minimum, "maxLength": maximum}
    for tokenizer, call in ((qwen(), SAID), (corpus_template("trl/qwen3_5_nothink").tokenizer(), WRITTEN)):
        matcher, _ = make_matcher(tokenizer, [required(text)])
        for length in {minimum, (minimum + maximum) // 2, maximum}:
            assert matcher.allows(call % ("é" * length))
        assert not matcher.allows(call % ("é" * (maximum + 1)))
        assert not matcher.allows(call % "</tool_call>")
        # xgrammar's own grammar between tags takes the line breaks around a text for a part of it
        assert minimum < 3 or not matcher.allows(call % ("é" * (minimum - 3)))


def test_lengths_are_followed_within_lists_and_definitions() -> None:
    short = {"type": "string", "maxLength": 2}
    schema: Any = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/maxLength"}, {"type": "integer"}]}}
    function = required(schema)
    function["function"]["parameters"]["$defs"] = {"maxLength": short}
    matcher, _ = make_matcher(qwen(), [function])
    assert matcher.allows(SAID.replace('"%s"', '["ab", 5]'))
    assert not matcher.allows(SAID.replace('"%s"', '["abc"]'))


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ({"type": "string", "pattern": "^.{2,20}$"}, "a<b"),
        ({"type": "string", "pattern": r"^[^a]\S[^\\d]*$"}, "b<c"),
        ({"type": "string", "pattern": "^(a|<b)+$"}, "a<b"),
        ({"type": "string", "format": "email"}, "a@b.org"),
        ({"type": "string", "format": "json-pointer"}, "/a/b"),
    ],
    ids=str,
)
def test_a_text_with_a_pattern_cannot_hold_the_token_that_ends_the_call(text: Any, allowed: str) -> None:
    matcher, _ = make_matcher(qwen(), [required(text)])
    assert matcher.allows(SAID % allowed)
    for held in ("</tool_call>", "/</tool_call>", "bb</tool_call>", r"\"</tool_call>\"@b.org"):
        assert not matcher.allows(SAID % held)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            {"pattern": "^<b>.*$"},
            r"'say' cannot be required: the pattern '\^<b>.*could spell </tool_call> or",
        ),
        ({"pattern": "^[ -~]*$"}, "could spell"),
        ({"pattern": r"^\u003e*$"}, "could spell"),
        ({"pattern": r"^\p{L}*$"}, "could spell"),
        ({"maxLength": 1001}, "maxLength 1001, which can be followed from 0 to 1000"),
        ({"minLength": 5, "maxLength": 4}, "minLength 5 and maxLength 4"),
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_followed_is_refused_by_name(text: Any, error: str) -> None:
    with pytest.raises(InvalidInputError, match=error):
        make_matcher(qwen(), [required({"type": "string", **text})])


def test_a_schema_whose_names_and_values_are_words_of_schemas_stays_as_it_is() -> None:
    schema: Any = {"type": "object", "properties": {"pattern": {"enum": [">"]}, "maxLength": {"type": "integer"}}}
    schema["properties"]["default"] = {"const": {"pattern": ">", "maxLength": 9000}}
    assert call_grammar._exclude_in_schema(schema, ["</tool_call>"]) == schema


@pytest.mark.parametrize("name", ['add", "x', "a b", ""])
def test_a_name_that_json_would_escape_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="name of letters"):
        make_matcher(qwen(), [tool(name)])


def test_control_tokens_are_given_by_id() -> None:
    tokenizer = qwen()
    renderer = TemplateRenderer(tokenizer)
    tag = json.loads(renderer.constrain_calls([ADD], prompt_ids=renderer.render(USER).token_ids, several=False))
    tokens = [part["token"] for part in tag["format"]["elements"] if part["type"] == "token"]
    assert tokens == [tokenizer.convert_tokens_to_ids(text) for text in ("<tool_call>", "</tool_call>")]
