"""I5 for any text: no message's text becomes a control id, and benign text is encoded as the tokenizer encodes it."""

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.conversations import (
    FAMILIES,
    TOOLS,
    WORDS,
    Conversation,
    Oracle,
    bridge_of,
    random_conversation,
    tools_of,
    with_names_of,
)
from support.effort import num_cases
from unbroken.rendering.base import TEMPLATE, Bridge
from unbroken.rendering.encoding.marks import Span
from unbroken.rendering.encoding.safe_encoder import SafeEncoder
from unbroken.rendering.encoding.tokenizer import AddedTokens
from unbroken.rendering.template import TemplateRenderer

SEEDS = st.integers(0, 2**32)
MANY = settings(max_examples=num_cases(25, in_fuzz=500), derandomize=True, database=None)
# Templates that write message text as it is. `qwen_thinking` cuts an assistant's text at `</think>`.
OPAQUE = [name for name in FAMILIES if name != "qwen_thinking"]


@functools.cache
def renderer_and_oracle(name: str, *, metaspace: bool = False) -> tuple[TemplateRenderer, Oracle]:
    tokenizer = FAMILIES[name].tokenizer(metaspace=metaspace)
    return TemplateRenderer(tokenizer), Oracle(FAMILIES[name], tokenizer)


@functools.cache
def hostile_words(name: str) -> tuple[str, ...]:
    """The template's control tokens, whole and in halves, among harmless words."""
    _, oracle = renderer_and_oracle(name)
    tokens = sorted(AddedTokens.find_control(oracle.tokenizer.backend_tokenizer).texts)
    halves = [half for token in tokens for half in (token[:2], token[:-1], token[1:], token[-2:])]
    return (*tokens, *tokens, *halves, *WORDS)


def control_ids(oracle: Oracle, ids: np.ndarray) -> list[int]:
    added = oracle.tokenizer.added_tokens_decoder
    return [i for i in ids.tolist() if i in added]


_FORM = frozenset(
    {
        "role",
        "content",
        "reasoning_content",
        "tool_calls",
        "tool_call_id",
        "id",
        "type",
        "function",
        "name",
        "arguments",
    }
    | {"description", "parameters", "properties", "enum", "text", "n", "last"}
)
"""Keys that are no text from outside."""


def replace_suspicious_text(messages: Sequence[Any]) -> list[Any]:
    """The same messages or tools with every text, name and id replaced by a word, but as empty or blank as before."""
    return [_harmless(message) for message in messages]


def _harmless(value: Any) -> Any:
    if isinstance(value, str):
        return "word" if value.strip() else value
    if isinstance(value, dict):
        return {
            key if key in _FORM else "word" + key[:1]: item if key in ("role", "type") else _harmless(item)
            for key, item in value.items()
        }
    return [_harmless(item) for item in value] if isinstance(value, list) else value


def hostile_case(name: str, seed: int) -> tuple[TemplateRenderer, Oracle, Oracle, Conversation]:
    """A conversation and tools that are hostile in every string, for the first oracle; the other's tools are not."""
    renderer, oracle = renderer_and_oracle(name)
    rng, words = random.Random(seed), hostile_words(name)
    conversation = random_conversation(rng, has_calls=FAMILIES[name].has_calls, words=words)
    tools = tools_of(rng, words)
    return (
        renderer,
        replace(oracle, tools=tools),
        replace(oracle, tools=replace_suspicious_text(tools)),
        with_names_of(rng, conversation, words),
    )


@pytest.mark.parametrize("name", OPAQUE)
@MANY
@given(seed=SEEDS)
def test_i5_no_text_name_id_argument_or_schema_of_a_first_prompt_becomes_a_control_id(name: str, seed: int) -> None:
    renderer, oracle, harmless, conversation = hostile_case(name, seed)
    messages = [*conversation.history, conversation.assistant, *conversation.new_messages]
    text = oracle.text(messages, generation_prompt=True)
    assume(text is not None)
    rendered = renderer.render(messages, tools=oracle.tools)
    benign = harmless.text(replace_suspicious_text(messages), generation_prompt=True)
    assert control_ids(oracle, rendered.token_ids) == control_ids(oracle, np.array(oracle.ids(benign)))
    assert oracle.tokenizer.decode(rendered.token_ids) == text
    assert not set(control_ids(oracle, rendered.token_ids[rendered.message_indices != TEMPLATE]))


@pytest.mark.parametrize("name", FAMILIES)
@MANY
@given(seed=SEEDS)
def test_i5_no_text_name_id_or_schema_becomes_a_control_id_of_a_bridge(name: str, seed: int) -> None:
    renderer, oracle, harmless, conversation = hostile_case(name, seed)
    stop = oracle.family.stop(conversation)
    outcome = bridge_of(renderer, oracle.tokenizer, stop, conversation, oracle.tools)
    assume(isinstance(outcome, Bridge) or name != "qwen_thinking")  # it cuts text at its own tags: refused
    benign = bridge_of(
        renderer,
        oracle.tokenizer,
        oracle.family.stop(conversation),
        _harmless_conversation(conversation),
        harmless.tools,
    )
    assert isinstance(outcome, Bridge) == isinstance(benign, Bridge)
    assume(isinstance(outcome, Bridge))
    assert control_ids(oracle, outcome.bridge_ids) == control_ids(oracle, benign.bridge_ids)
    assert not control_ids(oracle, outcome.bridge_ids[outcome.message_indices != TEMPLATE])
    everything = [*conversation.history, conversation.assistant, *conversation.new_messages]
    full = oracle.text(everything, generation_prompt=True)
    assert full is None or full.endswith(oracle.tokenizer.decode(outcome.bridge_ids))


def _harmless_conversation(conversation: Conversation) -> Conversation:
    """Ids stay apart, because they identify a turn's calls."""
    turn = replace_suspicious_text([conversation.assistant])[0]
    new_messages = replace_suspicious_text(conversation.new_messages)
    for number, call in enumerate(turn.get("tool_calls", ())):
        call["id"] = f"word{number}"
        new_messages[number]["tool_call_id"] = call["id"]
    return replace(conversation, assistant=turn, new_messages=new_messages)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("metaspace", [False, True], ids=["bytes", "metaspace"])
@MANY
@given(seed=SEEDS)
def test_i5_a_prompt_without_control_tokens_in_its_text_has_the_tokenizers_own_ids(
    name: str, metaspace: bool, seed: int
) -> None:
    renderer, oracle = renderer_and_oracle(name, metaspace=metaspace)
    conversation = random_conversation(random.Random(seed), has_calls=FAMILIES[name].has_calls)
    messages = [*conversation.history, conversation.assistant, *conversation.new_messages]
    text = oracle.text(messages, generation_prompt=True)
    assume(text is not None)
    assert renderer.render(messages, tools=TOOLS).token_ids.tolist() == oracle.ids(text)


@pytest.mark.parametrize("metaspace", [False, True], ids=["bytes", "metaspace"])
@MANY
@given(seed=SEEDS)
def test_i5_both_ways_to_encode_agree_on_benign_text(metaspace: bool, seed: int) -> None:
    _, oracle = renderer_and_oracle("qwen", metaspace=metaspace)
    encoder = _encoder(metaspace)
    conversation = random_conversation(random.Random(seed), has_calls=True)
    text = oracle.text([*conversation.history, conversation.assistant], generation_prompt=True)
    # Everything between two template tokens is a message's text: the text tokenizer has to encode all of it.
    ends = [0, *(i for match in encoder.control.find(text) for i in (match.start, match.stop)), len(text)]
    spans = [Span(start=a, stop=b, index=0) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]
    ids, _ = encoder._encode_separately(text, spans)
    assert ids.tolist() == oracle.ids(text)


@functools.cache
def _encoder(metaspace: bool) -> SafeEncoder:
    return SafeEncoder(renderer_and_oracle("qwen", metaspace=metaspace)[1].tokenizer.backend_tokenizer)


@MANY
@given(text=st.text(alphabet="ab \n<|im_end>/think", max_size=30), before=st.sampled_from(["", "<|", "<|im_", "</"]))
def test_i5_text_that_completes_a_control_token_across_its_border_stays_text(text: str, before: str) -> None:
    encoder = _encoder(False)
    whole = f"<|im_start|>user\n{before}{text}|>end<|im_end|>\n"
    start = len(f"<|im_start|>user\n{before}")
    encoding = encoder.encode(whole, [Span(start=start, stop=start + len(text), index=7)])
    control = [encoder.control.get_text(i) for i in encoding.token_ids.tolist() if encoder.control.get_text(i)]
    assert control == ["<|im_start|>", "<|im_end|>"]
    assert encoder.decode(encoding.token_ids.tolist()) == whole
