"""I5 for any text: no message's text becomes a control id, and benign text is encoded as the tokenizer encodes it."""

import functools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.conversations import FAMILIES, TOOLS, WORDS, Conversation, Oracle, bridge_of, random_conversation
from unbroken.messages import Message
from unbroken.rendering.base import TEMPLATE, Bridge
from unbroken.rendering.control import ControlTokens
from unbroken.rendering.encoding import SafeEncoder
from unbroken.rendering.marking import Span
from unbroken.rendering.template import TemplateRenderer

SEEDS = st.integers(0, 2**32)
MANY = settings(max_examples=150, derandomize=True, deadline=None, database=None)
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
    tokens = sorted(ControlTokens.of(oracle.tokenizer.backend_tokenizer).texts)
    halves = [half for token in tokens for half in (token[:2], token[:-1], token[1:], token[-2:])]
    return (*tokens, *tokens, *halves, *WORDS)


def control_ids(oracle: Oracle, ids: np.ndarray) -> list[int]:
    added = oracle.tokenizer.added_tokens_decoder
    return [i for i in ids.tolist() if i in added]


def with_harmless_text(messages: list[Message]) -> list[Message]:
    """The same messages with every text replaced by a word, but as empty or blank as before."""
    return [_harmless(message) for message in messages]


def _harmless(value: Any) -> Any:
    if isinstance(value, str):
        return "word" if value.strip() else value
    if isinstance(value, dict):
        kept = ("role", "id", "tool_call_id", "name", "type")
        return {key: item if key in kept else _harmless(item) for key, item in value.items()}
    return [_harmless(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", OPAQUE)
@MANY
@given(seed=SEEDS)
def test_i5_no_text_of_a_first_prompt_becomes_a_control_id(name: str, seed: int) -> None:
    renderer, oracle = renderer_and_oracle(name)
    conversation = random_conversation(
        random.Random(seed), has_calls=FAMILIES[name].has_calls, words=hostile_words(name)
    )
    messages = [*conversation.history, conversation.assistant, *conversation.new_messages]
    text = oracle.text(messages, generation_prompt=True)
    if text is None:
        return
    rendered = renderer.render(messages, tools=TOOLS)
    benign = oracle.text(with_harmless_text(messages), generation_prompt=True)
    assert control_ids(oracle, rendered.token_ids) == control_ids(oracle, np.array(oracle.ids(benign)))
    assert oracle.tokenizer.decode(rendered.token_ids) == text
    assert not set(control_ids(oracle, rendered.token_ids[rendered.message_indices != TEMPLATE]))


@pytest.mark.parametrize("name", FAMILIES)
@MANY
@given(seed=SEEDS)
def test_i5_no_text_of_a_new_message_becomes_a_control_id(name: str, seed: int) -> None:
    renderer, oracle = renderer_and_oracle(name)
    rng = random.Random(seed)
    conversation = random_conversation(rng, has_calls=FAMILIES[name].has_calls, words=hostile_words(name))
    outcome = bridge_of(renderer, oracle, conversation)
    benign = bridge_of(renderer, oracle, _with_harmless_new_messages(conversation))
    if not (isinstance(outcome, Bridge) and isinstance(benign, Bridge)):
        assert not isinstance(benign, Bridge) or name == "qwen_thinking"
        return
    assert control_ids(oracle, outcome.bridge_ids) == control_ids(oracle, benign.bridge_ids)
    assert not control_ids(oracle, outcome.bridge_ids[outcome.message_indices != TEMPLATE])
    everything = [*conversation.history, conversation.assistant, *conversation.new_messages]
    full = oracle.text(everything, generation_prompt=True)
    assert full is None or full.endswith(oracle.tokenizer.decode(outcome.bridge_ids))


def _with_harmless_new_messages(conversation: Conversation) -> Conversation:
    return Conversation(
        history=conversation.history,
        assistant=conversation.assistant,
        new_messages=with_harmless_text(conversation.new_messages),
        mark=conversation.mark,
    )


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
    if text is not None:
        assert renderer.render(messages, tools=TOOLS).token_ids.tolist() == oracle.ids(text)


@pytest.mark.parametrize("metaspace", [False, True], ids=["bytes", "metaspace"])
@MANY
@given(seed=SEEDS)
def test_i5_both_ways_to_encode_agree_on_benign_text(metaspace: bool, seed: int) -> None:
    _, oracle = renderer_and_oracle("qwen", metaspace=metaspace)
    encoder = _encoder(metaspace)
    conversation = random_conversation(random.Random(seed), has_calls=True)
    text = oracle.text([*conversation.history, conversation.assistant], generation_prompt=True)
    # Everything between two template tokens is a message's text: the twin of the tokenizer has to encode all of it.
    ends = [0, *(i for match in encoder.control.find(text) for i in (match.start, match.stop)), len(text)]
    spans = [Span(start=a, stop=b, index=0) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]
    ids, _ = encoder._encode_apart(text, spans)
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
    control = [encoder.control.text_of(i) for i in encoding.token_ids.tolist() if encoder.control.text_of(i)]
    assert control == ["<|im_start|>", "<|im_end|>"]
    assert encoder.decode(encoding.token_ids.tolist()) == whole
