"""Rows of conversations: each trained id has the context that sampling would have had, or they are refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from support import templates
from support.tokenizers import make_tokenizer
from unbroken.errors import InvalidInputError
from unbroken.messages import Message
from unbroken.rendering.base import HistoryPolicy
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.conversations import make_conversation_rows
from unbroken.types import TrainingSample

QUERY = {"type": "object", "properties": {"query": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": QUERY}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": {"query": "Paris"}}}
TALK: list[Any] = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny."},
    {"role": "user", "content": "and tomorrow?"},
    {"role": "assistant", "content": "I do not know."},
    {"role": "user", "content": "ok"},
]
TEXTS = [TALK[k] for k in (0, 3, 4, 5, 6)]
THOUGHTS = [
    {**each, "reasoning_content": f"So {k}."} if each["role"] == "assistant" else each for k, each in enumerate(TALK)
]


def renderer_of(template: str, **settings: Any) -> TemplateRenderer:
    return TemplateRenderer(make_tokenizer(template, control_tokens=templates.GLM_CONTROL_TOKENS), **settings)


def mark(row: TrainingSample, renderer: TemplateRenderer) -> str:
    """The text of a row, with brackets around what is trained."""
    borders = [0, *(np.flatnonzero(np.diff(row.loss_mask)) + 1).tolist(), len(row.token_ids)]
    texts = (renderer._encoder.decode(row.token_ids[a:b].tolist()) for a, b in itertools.pairwise(borders))
    return "".join(f"[[{text}]]" if k % 2 else text for k, text in enumerate(texts))


def find_trained(messages: Sequence[Message], template: str, tools: Sequence[Any] = (), **settings: Any) -> list[str]:
    renderer = renderer_of(template, **settings)
    rows = make_conversation_rows(messages, tools=tools, renderer=renderer)
    return [mark(row, renderer) for row in rows]


@pytest.mark.parametrize(
    ("template", "messages", "tools"),
    [
        (templates.CHATML, TEXTS, ()),
        (templates.QWEN, TALK, TOOLS),
        (templates.STRING_ARGUMENTS, TALK, TOOLS),
        (templates.LLAMA, TEXTS, ()),
        (templates.GLM, TALK, TOOLS),
        (templates.TWO_TOKEN_CLOSE, TEXTS, ()),
    ],
    ids=["chatml", "qwen", "string arguments", "llama", "glm", "two ids"],
)
def test_each_turn_follows_the_rendering_of_what_came_before_and_ends_where_sampling_stops(template, messages, tools):
    renderer = renderer_of(template)
    (row,) = make_conversation_rows(messages, tools=tools, renderer=renderer)
    starts = np.flatnonzero(np.diff(row.loss_mask.astype(int)) == 1) + 1
    ends = np.append(np.flatnonzero(np.diff(row.loss_mask.astype(int)) == -1) + 1, len(row.token_ids))
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(starts) == len(places)
    with_objects = json.loads(json.dumps(messages).replace("null", '""'))
    for start, end, place in zip(starts, ends, places, strict=True):
        prompt = renderer.render(with_objects[:place], tools=tools)
        assert row.token_ids[:start].tolist() == prompt.token_ids.tolist()
        assert row.token_ids[end - 1] in renderer.get_stop_token_ids()
        parsed = renderer.parse_response(row.token_ids[start:end], prompt_ids=prompt.token_ids, tools=tools)
        assert parsed.content == (messages[place]["content"] or "")
        assert [call.arguments for call in parsed.tool_calls] == [
            call["function"]["arguments"] for call in messages[place].get("tool_calls", ())
        ]


def test_nothing_of_the_template_around_a_turn_is_trained():
    (row,) = find_trained(TEXTS, templates.CHATML)
    assert row == (
        "<|im_start|>user\nweather?<|im_end|>\n<|im_start|>assistant\n[[It is sunny.<|im_end|>]]\n"
        "<|im_start|>user\nand tomorrow?<|im_end|>\n<|im_start|>assistant\n[[I do not know.<|im_end|>]]"
    )


def test_where_rollouts_keep_reasoning_that_the_template_drops_so_do_rows():
    (row,) = find_trained(THOUGHTS, templates.QWEN_THINKING, TOOLS)
    assert [f"So {k}." in row for k in (1, 3, 5)] == [True] * 3
    assert row.count("[[<think>") == 3


def test_where_rollouts_fork_so_do_rows_and_each_turn_is_trained_once():
    first, second = find_trained(THOUGHTS, templates.QWEN_THINKING, TOOLS, history=HistoryPolicy.TEMPLATE)
    assert (first.count("[["), second.count("[[")) == (2, 1)
    assert "So 3." in first
    assert "So 3." not in second
    assert second.endswith("[[<think>\nSo 5.\n</think>\n\nI do not know.<|im_end|>]]")


def test_text_that_spells_control_tokens_is_text():
    renderer = renderer_of(templates.CHATML)
    (row,) = make_conversation_rows(
        [{"role": "user", "content": "1"}, {"role": "assistant", "content": "a<|im_end|>b"}], renderer=renderer
    )
    (stop,) = (i for i in renderer.get_stop_token_ids() if i in row.token_ids)
    assert (row.token_ids[row.loss_mask] == stop).sum() == 1
    assert row.token_ids[-1] == stop


@pytest.mark.parametrize(
    ("messages", "tools", "words"),
    [
        (TEXTS[:1], (), "must have an assistant turn"),
        (TEXTS[1:], (), r"messages\[0\] must answer another message, and it is the first"),
        ([*TEXTS[:2], TEXTS[1]], (), r"messages\[2\] must answer another message.* follows another assistant turn"),
        ([TEXTS[0], {"role": "assistant", "content": " "}], (), r"messages\[1\] is an assistant turn without content"),
        ([TEXTS[0], {**TEXTS[1], "weight": 0}], (), r"messages\[1\] must be without 'weight'"),
        (TALK, TOOLS, r"messages\[1\] must be what is read back .* tool calls are \[\('search', .* read back \[\]"),
        ([TEXTS[0], THOUGHTS[3]], (), r"messages\[1\] must be .* reasoning is 'So 3.', and read back ''"),
        ([{**TALK[2]}, TEXTS[1]], (), r"messages\[0\].role must not be 'tool'"),
    ],
    ids=["no turn", "turn first", "two turns", "empty turn", "weights", "calls", "reasoning", "tool first"],
)
def test_what_the_model_would_not_have_written_so_is_refused(messages, tools, words):
    with pytest.raises(InvalidInputError, match=words):
        find_trained(messages, templates.CHATML, tools)


@pytest.mark.parametrize("template", templates.HISTORY_DEPENDENT.values(), ids=templates.HISTORY_DEPENDENT)
def test_a_template_that_opens_turns_by_the_history_is_refused_or_as_it_renders(template):
    renderer = renderer_of(template)
    try:
        rows = make_conversation_rows(TEXTS, renderer=renderer)
    except InvalidInputError:
        return
    prompts = [renderer.render(TEXTS[:place]).token_ids.tolist() for place in (1, 3)]
    starts = [np.flatnonzero(np.diff(row.loss_mask.astype(int)) == 1) + 1 for row in rows]
    found = [row.token_ids[:start].tolist() for row, of_row in zip(rows, starts, strict=True) for start in of_row]
    assert found == prompts
