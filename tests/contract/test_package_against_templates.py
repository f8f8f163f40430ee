"""Where a renderer of the package `renderers` and the chat template of its family disagree, by name.

Each pair renders random conversations, and bridges their last turn. A difference that no entry of `DISAGREEMENTS`
explains fails, and so does an entry whose example no longer shows it: neither side can change unnoticed. The template's
side is transformers' own rendering for prompts, and `TemplateRenderer`, which the property tests hold against that, for
bridges.
"""

import random
from collections import Counter

import pytest

from support.conversations import random_conversation
from support.package_disagreements import (
    BRIDGE_DISAGREEMENTS,
    DISAGREEMENTS,
    BridgeDisagreement,
    Disagreement,
    turn,
    user,
)
from support.package_pairs import PAIRS, REFUSED, difference, sides_of
from support.package_renderers import package_tokenizer
from unbroken.integrations.renderers.registry import load_renderer

NUM_CONVERSATIONS = 60


@pytest.mark.parametrize("name", PAIRS)
def test_a_prompt_is_the_templates_or_differs_in_a_way_that_is_listed(name: str) -> None:
    sides = sides_of(name)
    listed = [disagreement for disagreement in DISAGREEMENTS if disagreement.pair == name]
    rng = random.Random(name)
    num_equal = 0
    for _ in range(NUM_CONVERSATIONS):
        conversation = random_conversation(rng, has_calls=True)
        messages = [*conversation.history, conversation.assistant, *conversation.new_messages]
        generation_prompt = rng.random() < 0.5
        theirs = sides.by_package(messages, generation_prompt=generation_prompt)
        expected = sides.by_template(messages, generation_prompt=generation_prompt)
        if theirs == expected:
            num_equal += theirs != REFUSED
        else:
            assert any(d.applies(messages, generation_prompt) for d in listed), difference(expected, theirs)
    assert num_equal >= sides.pair.num_equal


@pytest.mark.parametrize("disagreement", DISAGREEMENTS, ids=lambda d: f"{d.pair}: {d.what}")
def test_a_listed_difference_is_there(disagreement: Disagreement) -> None:
    sides = sides_of(disagreement.pair)
    has_prompt = disagreement.generation_prompt
    theirs = sides.by_package(disagreement.example, generation_prompt=has_prompt)
    expected = sides.by_template(disagreement.example, generation_prompt=has_prompt)
    assert disagreement.applies(disagreement.example, has_prompt)
    assert difference(expected, theirs) == (disagreement.template, disagreement.package)


def test_without_a_date_llama_3_has_a_fixed_one_and_its_template_todays() -> None:
    tokenizer = package_tokenizer("llama-3", template="trl/llama3_2")
    prompt = load_renderer(tokenizer, renderer="pkg:llama-3").render([user("a")])
    assert "Today Date: 26 Jul 2024" in tokenizer.decode(prompt.token_ids)
    assert "26 Jul 2024" not in tokenizer.apply_chat_template([user("a")], tokenize=False)


@pytest.mark.parametrize("name", PAIRS)
def test_i1_a_bridge_is_the_templates_or_differs_in_a_way_that_is_listed(name: str) -> None:
    sides = sides_of(name)
    listed = [disagreement for disagreement in BRIDGE_DISAGREEMENTS if disagreement.pair == name]
    rng = random.Random(name)
    counts: Counter[str] = Counter()
    for _ in range(NUM_CONVERSATIONS // 2):
        conversation = random_conversation(rng, has_calls=True)
        completion = sides.completion(conversation)
        if completion is None:
            continue
        theirs, expected = (
            sides.bridge(renderer, conversation.history, conversation.assistant, completion, conversation.new_messages)
            for renderer in (sides.package, sides.template)
        )
        if REFUSED in (theirs, expected):
            continue  # each may refuse what the other can do
        counts["equal" if theirs == expected else "other"] += 1
        if theirs != expected:
            assert any(d.applies(conversation) for d in listed), difference(expected, theirs)
    assert counts["equal"] >= sides.pair.num_equal_bridges


@pytest.mark.parametrize("disagreement", BRIDGE_DISAGREEMENTS, ids=lambda d: f"{d.pair}: {d.what}")
def test_a_listed_difference_of_bridges_is_there(disagreement: BridgeDisagreement) -> None:
    sides = sides_of(disagreement.pair)
    theirs, expected = (
        sides.bridge(renderer, [user("hello")], turn("a"), disagreement.turn, [disagreement.new_message])
        for renderer in (sides.package, sides.template)
    )
    assert difference(expected, theirs) == (disagreement.template, disagreement.package)
