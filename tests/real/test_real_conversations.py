"""Bridges and parsers over conversations with the tools of real APIs, by a real tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from support.corpus import corpus_template
from support.corpus_oracle import facts_of
from support.exact_bridges import is_exact
from support.round_trips import num_common
from support.tokenizer_kinds import TokenizerKind
from support.tool_conversations import ToolConversation, read_conversations
from unbroken.rendering.base import Bridge
from unbroken.rendering.template import TemplateRenderer
from unbroken.types import TokenIds

pytestmark = pytest.mark.real

TEMPLATES = ("qwen2_5", "qwen3_5_nothink", "llama3_1", "glm4moe", "deepseekv3", "gptoss", "gemma4_v5")
"""One of each way to write calls. LFM2's is left out: it quotes strings as they are, and "I'll" ends one."""
EVERY = 8
"""Of 200 conversations each so many-th is taken: each template then has 25, with more than 100 calls."""


@pytest.fixture(scope="module")
def chosen(conversations: Path) -> list[ToolConversation]:
    """Some of the conversations."""
    return read_conversations(conversations)[::EVERY]


@pytest.mark.parametrize("name", TEMPLATES)
def test_i1_real_tool_conversations_are_bridged_exactly_and_each_call_is_read_back(name, model, chosen):
    template = corpus_template(f"trl/{name}")
    kind = TokenizerKind(make_backend=lambda: Tokenizer.from_file(str(model / "tokenizer.json")))
    tokenizer, facts = template.tokenizer(kind=kind), facts_of(template)
    renderer = TemplateRenderer(tokenizer)
    num_bridges = num_calls = 0
    for conversation in chosen:
        for earlier, turn, new in split_at_turns(conversation.messages):
            calls = turn.get("tool_calls", [])
            stop = facts.stop_of_calls or facts.stop if calls else facts.stop
            prompt_ids, completion_ids = sample(
                renderer, tokenizer.convert_tokens_to_ids(stop), earlier, turn, conversation.tools
            )
            bridge = renderer.bridge_to_next_turn(
                prompt_ids, completion_ids, new, assistant=turn, tools=conversation.tools, earlier=earlier
            )
            assert isinstance(bridge, Bridge), bridge
            assert is_exact(renderer, bridge, [*earlier, turn, *new], conversation.tools)
            num_bridges += 1
            read = renderer.parse_response(completion_ids, prompt_ids=prompt_ids, tools=conversation.tools)
            assert [(each.name, each.arguments) for each in read.tool_calls] == [
                (each["function"]["name"], each["function"]["arguments"]) for each in calls
            ]
            num_calls += len(calls)
    assert num_calls > 100
    assert num_bridges > 150


def split_at_turns(messages: Any) -> Iterator[tuple[list[Any], Any, list[Any]]]:
    """Each turn of the assistant but the last, with the messages before it and those up to the next turn."""
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    for k, following in itertools.pairwise(turns):
        yield list(messages[:k]), messages[k], list(messages[k + 1 : following])


def sample(
    renderer: TemplateRenderer, stop_id: int, earlier: list[Any], turn: Any, tools: Any
) -> tuple[TokenIds, TokenIds]:
    """The ids of a prompt and of the turn, as a model that writes what the template does samples it.

    A prompt that the template does not repeat in its history ends where the two begin to differ.
    """
    whole = renderer.render_ids([*earlier, turn], tools=tools)
    start = num_common(renderer.render(earlier, tools=tools).token_ids, whole)
    ends = [k for k in range(start, len(whole)) if whole[k] == stop_id]
    return whole[:start], whole[start : ends[-1] + 1 if ends else len(whole)]
