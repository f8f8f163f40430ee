"""A tokenizer's own response template, read as transformers reads it, with a status and a span for each call."""

import copy
import random
from typing import Any

import pytest

from support.corpus import corpus_template
from support.round_trips import QUESTION, QUOTED_WORDS, TOOLS, TurnRenderer, random_calls, random_text
from support.templates import CHATML
from support.tokenizers import make_tokenizer
from unbroken.errors import InvalidInputError
from unbroken.messages import Message
from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.rendering.template import TemplateRenderer

CALL_FIELD: dict[str, Any] = {
    "open": "<tool_call>",
    "close_pattern": r"</tool_call>\s*",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
CHATML_LIKE: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"},
        "tool_calls": CALL_FIELD,
        "content": {"close_pattern": r"<\|im_end\|>\s*"},
    },
}
HARMONY_LIKE: dict[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": "<|return|>"},
        "tool_calls": {
            "open_pattern": r"to=functions\.(?P<name>\S+?)<\|channel\|>commentary json<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
TAGGED: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close_pattern": r"</think>\s*"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>]+)>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>]+)>\n(?P<value>.*?)\n</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>"},
    },
}
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
NAME = "response_template"


def with_template(tokenizer: Any, response_template: Any) -> Any:
    tokenizer.response_template = copy.deepcopy(response_template)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    return with_template(make_tokenizer(CHATML, control_tokens=tags), CHATML_LIKE)


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> TemplateRenderer:
    return TemplateRenderer(tokenizer, parser=NAME)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("name", "response_template"),
    [
        ("trl/qwen3", CHATML_LIKE),
        ("trl/qwen3_instruct_2507", CHATML_LIKE),
        ("trl/gptoss", HARMONY_LIKE),
        ("trl/qwen3_8", TAGGED),
    ],
)
def test_a_turn_is_read_as_transformers_reads_it(name: str, response_template: Any) -> None:
    template = corpus_template(name)
    turns = TurnRenderer.of(template)
    tokenizer = with_template(turns.tokenizer, response_template)
    renderer = TemplateRenderer(tokenizer, parser=NAME)
    rng = random.Random(name)
    for _ in range(60):
        turn = random_turn(rng, one_kind=name == "trl/gptoss")
        rendered = turns.render(turn)
        assert rendered is not None
        prompt = tokenizer.decode(rendered.prompt_ids)
        theirs = tokenizer.parse_response(rendered.text, prefix=prompt, tools=list(TOOLS))
        ours = renderer.parse_response(rendered.completion_ids, prompt_ids=rendered.prompt_ids, tools=TOOLS)
        case = f"{rendered.text!r}\n{theirs}\n{ours}"
        assert ours.content == theirs.get("content", ""), case
        assert ours.reasoning == theirs.get("reasoning_content", theirs.get("thinking", "")), case
        assert [call.status for call in ours.failures] == [], case
        calls = [{"name": call.name, "arguments": call.arguments} for call in ours.tool_calls]
        assert calls == [call["function"] for call in theirs.get("tool_calls", [])], case
        assert [i for part in ours.parts for i in range(*part.span)] == list(range(len(rendered.completion_ids)))


def random_turn(rng: random.Random, *, one_kind: bool) -> Message:
    """One that both read alike; of one kind, it has content or one call."""
    num_calls = rng.randrange(2 if one_kind else 3)
    turn: Message = {"role": "assistant", "content": random_text(rng, QUOTED_WORDS)}
    if rng.random() < 0.5:
        turn["reasoning_content"] = random_text(rng, QUOTED_WORDS)
    if num_calls:
        turn["tool_calls"] = random_calls(rng, num_calls, QUOTED_WORDS)
        turn["content"] = "" if one_kind else turn["content"]
    return turn


def test_each_id_is_in_one_part_and_each_call_has_its_span(renderer: TemplateRenderer, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, f"<think>add them</think>Let me see.{ADD}{ADD}<|im_end|>")
    parsed = renderer.parse_response(ids)
    assert (parsed.reasoning, parsed.content) == ("add them", "Let me see.")
    assert [tokenizer.decode(ids[slice(*call.span)]) for call in parsed.tool_calls] == [ADD, ADD]
    texts = [(part.kind.value, tokenizer.decode(ids[slice(*part.span)])) for part in parsed.parts]
    assert texts == [
        ("markup", "<think>"),
        ("reasoning", "add them"),
        ("markup", "</think>"),
        ("content", "Let me see."),
        ("tool_call", ADD),
        ("tool_call", ADD),
        ("stop", "<|im_end|>"),
    ]


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        ("{not json}", ToolCallStatus.INVALID_JSON),
        ('{"name": "f", "arguments": {"x": NaN}}', ToolCallStatus.INVALID_JSON),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', ToolCallStatus.INVALID_JSON),
        ("[" * 5000, ToolCallStatus.INVALID_JSON),
        ("[1]", ToolCallStatus.MISSING_NAME),
        ("3", ToolCallStatus.MISSING_NAME),
        ('{"arguments": {}}', ToolCallStatus.MISSING_NAME),
        ('{"name": "f"}', ToolCallStatus.OK),
        ('{"name": "f", "parameters": {"a": 1}}', ToolCallStatus.INVALID_ARGUMENTS),
        ('{"name": "f", "arguments": [1]}', ToolCallStatus.INVALID_ARGUMENTS),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', ToolCallStatus.OK),
    ],
)
def test_a_broken_call_is_data_and_the_others_are_read(
    renderer: TemplateRenderer, tokenizer: Any, raw: str, status: ToolCallStatus
) -> None:
    calls = renderer.parse_response(ids_of(tokenizer, f"<tool_call>{raw}</tool_call>{ADD}<|im_end|>")).tool_calls
    assert [call.status for call in calls] == [status, ToolCallStatus.OK]
    assert calls[0].raw == raw
    assert calls[0].name == ("f" if raw.startswith('{"name": "f"') else "")


def test_what_was_cut_is_unclosed(renderer: TemplateRenderer, tokenizer: Any) -> None:
    (call,) = renderer.parse_response(
        ids_of(tokenizer, '<tool_call>{"name": "f", "arguments": {}}<|im_end|>')
    ).tool_calls
    assert call.status is ToolCallStatus.UNCLOSED
    parsed = renderer.parse_response(ids_of(tokenizer, "<think>abc<|im_end|>"))
    assert (parsed.reasoning, parsed.reasoning_complete, parsed.content) == ("abc", False, "")


def test_a_call_in_reasoning_that_was_not_closed_is_counted(renderer: TemplateRenderer, tokenizer: Any) -> None:
    parsed = renderer.parse_response(ids_of(tokenizer, f"<think>hm{ADD}<|im_end|>"))
    assert [(call.status, call.raw) for call in parsed.tool_calls] == [(ToolCallStatus.IN_REASONING, ADD)]
    assert not renderer.parse_response(ids_of(tokenizer, f"<think>hm{ADD}</think>so<|im_end|>")).tool_calls


def test_a_delimiter_spelled_with_ordinary_ids_is_text(renderer: TemplateRenderer, tokenizer: Any) -> None:
    ids = [i for character in ADD for i in ids_of(tokenizer, character)]
    parsed = renderer.parse_response([*ids, *ids_of(tokenizer, "<|im_end|>")])
    assert (parsed.content, parsed.tool_calls) == (ADD, ())


def test_content_on_both_sides_of_a_call_is_kept(renderer: TemplateRenderer, tokenizer: Any) -> None:
    assert renderer.parse_response(ids_of(tokenizer, f"One.{ADD}Two.<|im_end|>")).content == "One.\nTwo."


def test_a_prompt_may_have_opened_the_reasoning(renderer: TemplateRenderer, tokenizer: Any) -> None:
    thinking = CHATML.replace("assistant\\n' -}}", "assistant\\n<think>' -}}")
    opened = TemplateRenderer(tokenizer, chat_template=thinking, parser=NAME)
    prompt_ids = opened.render([QUESTION]).token_ids
    assert tokenizer.decode(prompt_ids).endswith("<think>")
    parsed = opened.parse_response(ids_of(tokenizer, "add them</think>It is 3.<|im_end|>"), prompt_ids=prompt_ids)
    assert (parsed.reasoning, parsed.content) == ("add them", "It is 3.")
    parsed = renderer.parse_response(ids_of(tokenizer, "It is 3.<|im_end|>"), prompt_ids=prompt_ids[:-1])
    assert (parsed.reasoning, parsed.content) == ("", "It is 3.")


@pytest.mark.parametrize("split", [1, 3, 100])
def test_it_is_read_at_the_end_of_a_completion(renderer: TemplateRenderer, tokenizer: Any, split: int) -> None:
    ids = ids_of(tokenizer, f"<think>so</think>It is 3.{ADD}<|im_end|>")
    reader = renderer.open_response()
    assert [delta for k in range(0, len(ids), split) for delta in reader.feed(ids[k : k + split])] == []
    assert [delta.kind for delta in reader.close()] == [PartKind.REASONING, PartKind.CONTENT, PartKind.TOOL_CALL]
    assert reader.finish() == renderer.parse_response(ids)


def test_random_ids_are_read_without_an_error(renderer: TemplateRenderer, tokenizer: Any) -> None:
    rng = random.Random(1)
    control = sorted(tokenizer.get_added_vocab().values())
    for _ in range(300):
        ids = [
            rng.choice(control) if rng.random() < 0.3 else rng.randrange(len(tokenizer))
            for _ in range(rng.randrange(30))
        ]
        parsed = renderer.parse_response(ids)
        assert [i for part in parsed.parts for i in range(*part.span)] == list(range(len(ids)))


def test_patterns_that_match_nothing_come_to_an_end(tokenizer: Any) -> None:
    empty = {
        "start_anchor": "x",
        "fields": {"thinking": {"open_pattern": "(?=a)", "close_pattern": "(?=a)"}, "content": {}},
    }
    renderer = TemplateRenderer(with_template(copy.deepcopy(tokenizer), empty), parser=NAME)
    assert renderer.parse_response(ids_of(tokenizer, "say aaa")).content == "s"


def test_of_an_opening_and_a_closing_at_the_same_place_the_opening_counts(tokenizer: Any) -> None:
    same = {"start_anchor": "x", "fields": {"thinking": {"open": "<think>"}, "content": {"close": "<think>"}}}
    renderer = TemplateRenderer(with_template(copy.deepcopy(tokenizer), same), parser=NAME)
    parsed = renderer.parse_response(ids_of(tokenizer, "one<think>two"))
    assert (parsed.content, parsed.reasoning) == ("one", "two")


def test_it_is_chosen_where_the_chat_template_shows_no_format_of_ours() -> None:
    assert TemplateRenderer(with_template(make_tokenizer(CHATML), CHATML_LIKE)).parser_name == NAME
    assert TemplateRenderer(with_template(corpus_template("trl/gemma3").tokenizer(), CHATML_LIKE)).parser_name == NAME
    assert (
        TemplateRenderer(with_template(corpus_template("trl/qwen3").tokenizer(), CHATML_LIKE)).parser_name == "hermes"
    )
    assert TemplateRenderer(make_tokenizer(CHATML)).parser_name == "hermes"
    named = TemplateRenderer(with_template(make_tokenizer(CHATML), CHATML_LIKE), parser="llama3")
    assert named.parser_name == "llama3"


def test_a_missing_or_broken_response_template_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match=r"needs a tokenizer with a response_template"):
        TemplateRenderer(make_tokenizer(CHATML), parser=NAME)
    with pytest.raises(InvalidInputError, match=r"does not accept tokenizer.response_template: .*start_anchor"):
        TemplateRenderer(with_template(make_tokenizer(CHATML), {"fields": {"content": {}}}))
