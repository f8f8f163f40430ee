"""I1 and I7 for any conversation: every bridge equals the template's own rendering, in text and ids, or is refused."""

import functools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support import templates
from support.conversations import (
    FAMILIES,
    TOOLS,
    Conversation,
    Family,
    Oracle,
    Verdict,
    bridge_of,
    random_conversation,
)
from support.effort import num_cases
from unbroken.messages import Message
from unbroken.rendering.base import Bridge, Closing, Refusal
from unbroken.rendering.template import TemplateRenderer

# The other templates rewrite each turn, or its generation prompt, once more messages follow.
EXTENDING = [name for name in FAMILIES if name not in ("stand_in", "tools_in_prompt")]
HI: list[Message] = [{"role": "user", "content": "hi"}]
SEEDS = st.integers(0, 2**32)
MANY = settings(max_examples=num_cases(80), derandomize=True, deadline=None, database=None)
SOME = settings(max_examples=num_cases(40), derandomize=True, deadline=None, database=None)


@functools.cache
def renderer_and_oracle(name: str, *, metaspace: bool = False) -> tuple[TemplateRenderer, Oracle]:
    family = FAMILIES[name]
    tokenizer = family.tokenizer(metaspace=metaspace)
    return TemplateRenderer(tokenizer), Oracle(family, tokenizer)


@pytest.mark.parametrize("name", FAMILIES)
@MANY
@given(seed=SEEDS)
def test_i1_a_bridge_is_what_the_template_writes_after_the_turn(name: str, seed: int) -> None:
    renderer, oracle = renderer_and_oracle(name)
    conversation = random_conversation(random.Random(seed), has_calls=FAMILIES[name].has_calls)
    verdict = oracle.judge(conversation, bridge_of(renderer, oracle, conversation))
    assume(verdict is not Verdict.UNRENDERABLE)
    assert verdict is Verdict.EXACT


@pytest.mark.parametrize("name", EXTENDING)
@SOME
@given(seed=SEEDS)
def test_i1_prompt_and_completion_and_bridge_are_the_ids_of_the_whole_rendering(name: str, seed: int) -> None:
    renderer, oracle = renderer_and_oracle(name)
    conversation = random_conversation(random.Random(seed), has_calls=FAMILIES[name].has_calls)
    everything = [*conversation.history, conversation.assistant, *conversation.new_messages]
    full = oracle.text(everything, generation_prompt=True)
    completion = oracle.completion_text(conversation)
    prompt = oracle.text(conversation.history, generation_prompt=True)
    assume(full is not None and completion is not None)
    assume(full.startswith(prompt + completion))  # else it rewrites history: see the first property
    prompt_ids = renderer.render(conversation.history, tools=TOOLS).token_ids
    bridge = bridge_of(renderer, oracle, conversation)
    ids = [*prompt_ids.tolist(), *oracle.ids(completion), *bridge.bridge_ids.tolist()]
    assert oracle.tokenizer.decode(ids) == full
    if oracle.ids(prompt + completion) == [*prompt_ids.tolist(), *oracle.ids(completion)]:
        assert ids == oracle.ids(full)  # else a word of the turn began in its header, and the two may differ there


@pytest.mark.parametrize("name", ["qwen", "llama", "glm"])
@SOME
@given(seed=SEEDS)
def test_i1_holds_for_a_tokenizer_whose_first_word_is_special(name: str, seed: int) -> None:
    renderer, oracle = renderer_and_oracle(name, metaspace=True)
    conversation = random_conversation(random.Random(seed), has_calls=FAMILIES[name].has_calls)
    full = oracle.text(
        [*conversation.history, conversation.assistant, *conversation.new_messages], generation_prompt=True
    )
    outcome = bridge_of(renderer, oracle, conversation)
    assume(full is not None and oracle.completion_text(conversation) is not None)
    assert oracle.ids(full)[-len(outcome.bridge_ids) :] == outcome.bridge_ids.tolist()


@pytest.mark.parametrize("name", templates.HISTORY_DEPENDENT)
def test_i1_a_template_that_looks_back_gets_exact_bridges_unless_it_writes_an_earlier_message_again(name: str) -> None:
    family = Family(templates.HISTORY_DEPENDENT[name], has_calls=False)
    tokenizer = family.tokenizer()
    renderer, oracle = TemplateRenderer(tokenizer), Oracle(family, tokenizer)
    verdicts: Counter[Verdict] = Counter()
    for seed in range(40):
        conversation = random_conversation(random.Random(seed), has_calls=False)
        verdicts[oracle.judge(conversation, bridge_of(renderer, oracle, conversation))] += 1
    assert verdicts[Verdict.WRONG] == 0
    assert (verdicts[Verdict.REFUSED] > 0) is ("quotes" in name)


@pytest.mark.parametrize(
    "template", [templates.DATE_IN_SYSTEM, templates.DATE_IN_PROMPT, templates.TOOLS_IN_LAST_QUESTION]
)
def test_i1_dates_and_tools_that_move_are_no_reason_to_refuse(template: str) -> None:
    family = Family(template, has_calls=False)
    tokenizer = family.tokenizer()
    renderer, oracle = TemplateRenderer(tokenizer), Oracle(family, tokenizer)
    for seed in range(60):
        conversation = random_conversation(random.Random(seed), has_calls=False)
        assert oracle.judge(conversation, bridge_of(renderer, oracle, conversation)) is Verdict.EXACT


def test_i1_names_looked_up_by_id_are_what_the_template_finds_also_when_ids_are_not_unique() -> None:
    family = Family(templates.LOOKS_UP_NAMES_BY_ID)
    tokenizer = family.tokenizer()
    renderer, oracle = TemplateRenderer(tokenizer), Oracle(family, tokenizer)
    for seed in range(100):
        conversation = random_conversation(random.Random(seed), has_calls=True)
        assert oracle.judge(conversation, bridge_of(renderer, oracle, conversation)) is Verdict.EXACT
        for call in conversation.assistant.get("tool_calls", []):
            call["id"] = "same"
        for message in conversation.new_messages:
            if "tool_call_id" in message:
                message["tool_call_id"] = "same"
        assert oracle.judge(conversation, bridge_of(renderer, oracle, conversation)) is Verdict.EXACT


@pytest.mark.parametrize("change", ["lose the first id", "repeat the first id", "lose the last id", "change one id"])
def test_the_oracle_notices_a_bridge_that_is_wrong_by_one_id(change: str) -> None:
    renderer, oracle = renderer_and_oracle("qwen")
    for seed in range(50):
        conversation = random_conversation(random.Random(seed), has_calls=True)
        ids = bridge_of(renderer, oracle, conversation).bridge_ids
        where = seed % len(ids)
        wrong = {
            "lose the first id": ids[1:],
            "repeat the first id": np.concatenate([ids[:1], ids]),
            "lose the last id": ids[:-1],
            "change one id": np.concatenate([ids[:where], ids[where : where + 1] + 1, ids[where + 1 :]]),
        }[change]
        mutated = Bridge(bridge_ids=wrong, message_indices=np.full(len(wrong), -1, dtype=np.int32))
        assert oracle.judge(conversation, mutated) is Verdict.WRONG


def test_the_oracle_notices_a_bridge_that_ends_the_turn_at_another_message() -> None:
    renderer, oracle = renderer_and_oracle("chatml")
    conversation = random_conversation(random.Random(1), has_calls=False)
    ids = bridge_of(renderer, oracle, conversation).bridge_ids
    end = oracle.tokenizer.convert_tokens_to_ids("<|im_end|>")
    after_new_message = ids[ids.tolist().index(end) + 1 :]
    mutated = Bridge(bridge_ids=after_new_message, message_indices=np.full(len(after_new_message), -1, np.int32))
    assert oracle.judge(conversation, mutated) is Verdict.WRONG


def cut_turn(conversation: Conversation, oracle: Oracle, rng: random.Random) -> tuple[list[int], str] | None:
    """A completion without calls, cut anywhere before its stop, and the text of it."""
    if conversation.assistant.get("tool_calls") or conversation.assistant.get("reasoning_content"):
        return None
    completion = oracle.completion_text(conversation)
    if completion is None:
        return None
    ids = oracle.ids(completion)[:-2]
    ids = ids[: rng.randrange(len(ids) + 1)]
    return ids, oracle.tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["chatml", "qwen", "qwen_thinking", "llama", "glm", "two_token_close", "parts"])
@SOME
@given(seed=SEEDS)
def test_i7_a_cut_turn_is_closed_as_the_template_closes_its_text(name: str, seed: int) -> None:
    renderer, oracle = renderer_and_oracle(name)
    rng = random.Random(seed)
    conversation = random_conversation(rng, has_calls=False)
    cut = cut_turn(conversation, oracle, rng)
    assume(cut is not None and "\ufffd" not in cut[1])
    ids, _ = cut
    prompt_ids = renderer.render(conversation.history, tools=TOOLS).token_ids
    bridge = renderer.bridge_to_next_turn(
        prompt_ids,
        np.array(ids, np.int32),
        conversation.new_messages,
        assistant=conversation.assistant,
        tools=TOOLS,
        earlier=conversation.history,
    )
    whole_turn = bridge_of(renderer, oracle, conversation)
    assert isinstance(bridge, Bridge)
    assert bridge.closing is Closing.TRUNCATED
    assert bridge.num_taken_back == 0
    close = {"two_token_close": ["<|end_message|>", "<|end_sampling|>"]}.get(name, [oracle.family.stop(conversation)])
    given = [*oracle.tokenizer.convert_tokens_to_ids(close), *whole_turn.bridge_ids.tolist()]
    assert bridge.bridge_ids.tolist() == given


@pytest.mark.parametrize("name", FAMILIES)
@MANY
@given(seed=SEEDS)
def test_i1_any_sampled_ids_are_only_appended_to_and_parsed_without_an_error(name: str, seed: int) -> None:
    renderer, oracle = renderer_and_oracle(name)
    rng = random.Random(seed)
    control = list(oracle.tokenizer.added_tokens_decoder)
    vocabulary = len(oracle.tokenizer)
    soup = [
        rng.choice(control) if rng.random() < 0.3 else rng.randrange(vocabulary) for _ in range(rng.randrange(1, 40))
    ]
    completion_ids = np.array(soup, dtype=np.int32)
    prompt_ids = renderer.render(HI, tools=TOOLS).token_ids
    parsed = renderer.parse_response(completion_ids, prompt_ids=prompt_ids)
    for call in parsed.tool_calls:
        assert 0 <= call.span[0] < call.span[1] <= len(soup)
    message = parsed.to_message([f"callsoup{k}" for k in range(len(parsed.tool_calls))])
    new = [{"role": "user", "content": "go on"}]
    bridge = renderer.bridge_to_next_turn(prompt_ids, completion_ids, new, assistant=message, tools=TOOLS, earlier=HI)
    if isinstance(bridge, Refusal):
        assert name in ("llama", "stand_in")  # these templates show one call of a turn, or raise at the second
        assert len(message.get("tool_calls", [])) > 1
        return
    # What is given depends on the last id and on open reasoning only, wherever else ends were sampled.
    ordinary, opening = [1] * 5, oracle.tokenizer.convert_tokens_to_ids("<think>")
    if bridge.closing is not Closing.REASONING and not message.get("tool_calls") and soup[-1] != opening:
        again = renderer.bridge_to_next_turn(
            prompt_ids, np.array([*ordinary, soup[-1]], np.int32), new, assistant=message, tools=TOOLS, earlier=HI
        )
        assert again.bridge_ids.tolist() == bridge.bridge_ids.tolist()
        assert again.closing is bridge.closing
    assert bridge.num_taken_back <= (name == "glm")
