"""I1, I7: whatever was said and however a turn ended, a bridge is what a fresh rendering writes after it, or refused.

`test_rendering_encoding_properties` compares such renderings with transformers' own, for the same families.
"""

import asyncio
import functools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support import templates
from support.conversations import FAMILIES, TOOLS, WORDS, Conversation, Family, bridge_of, random_conversation
from support.effort import num_cases
from support.exact_bridges import is_exact
from support.scripted_env import ScriptedEnv
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import TemplateError
from unbroken.messages import Message
from unbroken.rendering.base import Bridge, BridgeOutcome, Closing, Refusal, ToolCallStatus
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.env import Continue
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.trajectory import Trajectory
from unbroken.types import SamplingParams

HI: list[Message] = [{"role": "user", "content": "hi"}]
METASPACE = ", metaspace"
"""Ends the names of families with a tokenizer whose first word is special."""
HONEST = {
    **FAMILIES,
    **{f"{name}{METASPACE}": FAMILIES[name] for name in ("qwen", "llama", "glm")},
    "names by id": Family(templates.LOOKS_UP_NAMES_BY_ID),
}
LOOKS_BACK = {name: Family(source, has_calls=False) for name, source in templates.HISTORY_DEPENDENT.items()}
MOVES = {
    "date in system": Family(templates.DATE_IN_SYSTEM, has_calls=False),
    "date in prompt": Family(templates.DATE_IN_PROMPT, has_calls=False),
    "tools in last question": Family(templates.TOOLS_IN_LAST_QUESTION, has_calls=False),
}
SEEDS = st.integers(0, 2**32)
MANY = settings(max_examples=num_cases(30, in_fuzz=600), derandomize=True, database=None)
SOME = settings(max_examples=num_cases(15, in_fuzz=300), derandomize=True, database=None)
FOREIGN = "<|endoftext|>"


def family_of(name: str) -> Family:
    return {**HONEST, **LOOKS_BACK, **MOVES}[name]


@functools.cache
def renderer_and_tokenizer(name: str) -> tuple[TemplateRenderer, Any]:
    tokenizer = family_of(name).tokenizer(metaspace=name.endswith(METASPACE))
    return TemplateRenderer(tokenizer), tokenizer


def forging_words(tokenizer: Any) -> tuple[str, ...]:
    control = list(tokenizer.get_added_vocab())
    return (*WORDS[:8], *control, *(token[: len(token) // 2] for token in control))


def random_case(name: str, seed: int) -> tuple[list[Message], BridgeOutcome]:
    """What follows a turn that ended in any way: whole, cut, by another model's stop, by a wrong header."""
    renderer, tokenizer = renderer_and_tokenizer(name)
    rng = random.Random(seed)
    words = rng.choice((WORDS, forging_words(tokenizer)))
    conversation = random_conversation(rng, has_calls=HONEST[name].has_calls, words=words)
    end = rng.choice(("stop", "stop", "cut", "foreign", "any stop"))
    message, ids = conversation.assistant, [1]
    if end == "stop":
        ids = [tokenizer.convert_tokens_to_ids(HONEST[name].stop(conversation))]
    elif end == "foreign":
        ids = [tokenizer.convert_tokens_to_ids(FOREIGN)]
    elif end == "any stop":
        ids = [rng.choice(renderer.get_stop_token_ids())]
    elif name == "qwen_thinking" and rng.random() < 0.7:
        ids = tokenizer.encode("<think>\nI wonder", add_special_tokens=False)
        message = {"role": "assistant", "content": "", "reasoning_content": "I wonder"}
    new = conversation.new_messages
    if message is not conversation.assistant:
        new = [{"role": "user", "content": "go on"}]
    bridge = renderer.bridge_to_next_turn(
        np.array([], np.int32),
        np.array(ids, np.int32),
        new,
        assistant=message,
        tools=TOOLS,
        earlier=conversation.history,
    )
    return [*conversation.history, message, *new], bridge


@pytest.mark.parametrize("name", HONEST)
@MANY
@given(seed=SEEDS)
def test_i1_a_bridge_after_any_ending_is_the_end_of_a_fresh_rendering(name: str, seed: int) -> None:
    messages, bridge = random_case(name, seed)
    renderer, _ = renderer_and_tokenizer(name)
    if isinstance(bridge, Bridge):
        assert is_exact(renderer, bridge, messages, TOOLS) is not False
    elif name != "stand_in":  # it leaves calls out; the others refuse what they cannot write
        with pytest.raises(TemplateError):
            renderer.render(messages, tools=TOOLS)


def test_the_cases_hold_every_kind_of_ending_and_almost_all_can_be_compared() -> None:
    closings: Counter[Closing] = Counter()
    outcomes: Counter[bool | None] = Counter()
    taken_back = 0
    for name in HONEST:
        for seed in range(120):
            messages, bridge = random_case(name, seed)
            if isinstance(bridge, Bridge):
                closings[bridge.closing] += 1
                taken_back += bridge.num_taken_back
            if isinstance(bridge, Bridge) and seed < 40:
                outcomes[is_exact(renderer_and_tokenizer(name)[0], bridge, messages, TOOLS)] += 1
    assert all(closings[closing] >= 10 for closing in Closing), closings
    assert taken_back > 10
    assert outcomes[True] > 0.9 * outcomes.total()


@pytest.mark.parametrize("name", HONEST)
@SOME
@given(seed=SEEDS)
def test_the_judge_takes_no_bridge_that_is_wrong_by_one_id_for_right(name: str, seed: int) -> None:
    messages, bridge = random_case(name, seed)
    if not isinstance(bridge, Bridge) or bridge.closing is not Closing.NONE:
        return
    rng = random.Random(seed)
    place = rng.randrange(len(bridge.bridge_ids))
    for ids in (
        np.delete(bridge.bridge_ids, place),
        np.insert(bridge.bridge_ids, place, rng.randrange(500)),
        np.where(np.arange(len(bridge.bridge_ids)) == place, bridge.bridge_ids + 1, bridge.bridge_ids),
    ):
        if bridge.num_taken_back and place == 0:
            continue  # it begins with the turn's end itself, and what is before that is not compared
        wrong = Bridge(
            bridge_ids=ids, message_indices=np.full(len(ids), -1, np.int32), num_taken_back=bridge.num_taken_back
        )
        assert is_exact(renderer_and_tokenizer(name)[0], wrong, messages, TOOLS) is not True


def bridge_after(name: str, conversation: Conversation) -> BridgeOutcome:
    """The bridge after the whole turn."""
    renderer, tokenizer = renderer_and_tokenizer(name)
    return bridge_of(renderer, tokenizer, family_of(name).stop(conversation), conversation)


def is_exact_after(name: str, conversation: Conversation) -> bool | None:
    """Whether that bridge is exact; None if it is refused, or cannot be compared."""
    bridge = bridge_after(name, conversation)
    everything = [*conversation.history, conversation.assistant, *conversation.new_messages]
    return is_exact(renderer_and_tokenizer(name)[0], bridge, everything, TOOLS) if isinstance(bridge, Bridge) else None


@pytest.mark.parametrize("name", LOOKS_BACK)
def test_i1_a_template_that_looks_back_gets_exact_bridges_unless_it_writes_an_earlier_message_again(name: str) -> None:
    conversations = [random_conversation(random.Random(seed), has_calls=False) for seed in range(40)]
    assert False not in [is_exact_after(name, conversation) for conversation in conversations]
    is_refused = any(isinstance(bridge_after(name, conversation), Refusal) for conversation in conversations)
    assert is_refused is ("quotes" in name)


@pytest.mark.parametrize("name", MOVES)
def test_i1_dates_and_tools_that_move_are_no_reason_to_refuse(name: str) -> None:
    for seed in range(60):
        assert is_exact_after(name, random_conversation(random.Random(seed), has_calls=False)) is True


def test_i1_names_are_looked_up_as_the_template_does_also_when_ids_are_not_unique() -> None:
    for seed in range(100):
        conversation = random_conversation(random.Random(seed), has_calls=True)
        for call in conversation.assistant.get("tool_calls", []):
            call["id"] = "same"
        for message in conversation.new_messages:
            if "tool_call_id" in message:
                message["tool_call_id"] = "same"
        assert is_exact_after("names by id", conversation) is True


@pytest.mark.parametrize("name", ["chatml", "qwen", "qwen_thinking", "llama", "glm", "two_token_close", "parts"])
@SOME
@given(seed=SEEDS)
def test_i7_a_cut_turn_is_closed_as_the_template_closes_its_text(name: str, seed: int) -> None:
    renderer, tokenizer = renderer_and_tokenizer(name)
    rng = random.Random(seed)
    conversation = random_conversation(rng, has_calls=False)
    turn = conversation.assistant
    ids = tokenizer.encode(turn["content"], add_special_tokens=False)
    ids = ids[: rng.randrange(len(ids) + 1)]
    assume("reasoning_content" not in turn and "\ufffd" not in tokenizer.decode(ids))
    bridge = renderer.bridge_to_next_turn(
        renderer.render(conversation.history, tools=TOOLS).token_ids,
        np.array(ids, np.int32),
        conversation.new_messages,
        assistant=turn,
        tools=TOOLS,
        earlier=conversation.history,
    )
    whole_turn = bridge_after(name, conversation)
    assert isinstance(bridge, Bridge)
    assert isinstance(whole_turn, Bridge)
    assert bridge.closing is Closing.TRUNCATED
    assert bridge.num_taken_back == 0
    close = {"two_token_close": ["<|end_message|>", "<|end_sampling|>"]}.get(name, [HONEST[name].stop(conversation)])
    given = [*tokenizer.convert_tokens_to_ids(close), *whole_turn.bridge_ids.tolist()]
    assert bridge.bridge_ids.tolist() == given


@pytest.mark.parametrize("name", FAMILIES)
@MANY
@given(seed=SEEDS)
def test_i1_any_sampled_ids_are_only_appended_to_and_parsed_without_an_error(name: str, seed: int) -> None:
    renderer, tokenizer = renderer_and_tokenizer(name)
    rng = random.Random(seed)
    control = list(tokenizer.added_tokens_decoder)
    vocabulary = len(tokenizer)
    soup = [
        rng.choice(control) if rng.random() < 0.3 else rng.randrange(vocabulary) for _ in range(rng.randrange(1, 40))
    ]
    completion_ids = np.array(soup, dtype=np.int32)
    prompt_ids = renderer.render(HI, tools=TOOLS).token_ids
    parsed = renderer.parse_response(completion_ids, prompt_ids=prompt_ids)
    for call in parsed.tool_calls:
        is_reasoning = call.status is ToolCallStatus.IN_REASONING  # then its ids are the reasoning's
        assert 0 <= call.span[0] <= call.span[1] <= len(soup)
        assert (call.span[0] == call.span[1]) == is_reasoning
    message = parsed.to_message([f"callsoup{k}" for k in range(len(parsed.tool_calls))])
    new = [{"role": "user", "content": "go on"}]
    bridge = renderer.bridge_to_next_turn(prompt_ids, completion_ids, new, assistant=message, tools=TOOLS, earlier=HI)
    if isinstance(bridge, Refusal):
        assert name in ("llama", "stand_in")  # these templates show one call of a turn, or raise at the second
        assert len(message.get("tool_calls", [])) > 1
        return
    # What is given depends on the last id and on open reasoning only, wherever else ends were sampled.
    ordinary, opening = [1] * 5, tokenizer.convert_tokens_to_ids("<think>")
    if bridge.closing is not Closing.REASONING and not message.get("tool_calls") and soup[-1] != opening:
        again = renderer.bridge_to_next_turn(
            prompt_ids, np.array([*ordinary, soup[-1]], np.int32), new, assistant=message, tools=TOOLS, earlier=HI
        )
        assert again.bridge_ids.tolist() == bridge.bridge_ids.tolist()
        assert again.closing is bridge.closing
    assert bridge.num_taken_back <= (name == "glm")


# --- in rollouts ------------------------------------------------------------------------------------------


def play(name: str, seed: int) -> Trajectory:
    """A random conversation played turn by turn, with token soup, cut turns and any stop id for replies."""
    renderer, tokenizer = renderer_and_tokenizer(name)
    rng = random.Random(seed)
    control = list(tokenizer.added_tokens_decoder)
    words = (*WORDS, *forging_words(tokenizer))
    replies = []
    for _ in range(rng.randrange(2, 6)):
        ids = tokenizer.encode(rng.choice(words) + rng.choice(words), add_special_tokens=False)
        soup = [rng.choice(control) if rng.random() < 0.2 else rng.randrange(500) for _ in range(rng.randrange(6))]
        stop = [rng.choice(renderer.get_stop_token_ids())] if rng.random() < 0.7 else []
        replies.append([*ids, *soup, *stop] or [1])
    outcomes = [
        Continue(messages=[{"role": rng.choice(("user", "user", "tool")), "name": "x", "content": rng.choice(words)}])
        for _ in replies[1:]
    ]
    return asyncio.run(
        run_rollout(
            ScriptedEnv(outcomes, messages=[{"role": "user", "content": rng.choice(words)}]),
            engine=ScriptedEngine(replies, vocab_size=len(tokenizer), allow_forks=True),
            renderer=renderer,
            sampling=SamplingParams(max_tokens=12),
            limits=Limits(),
        )
    )


@pytest.mark.parametrize("name", HONEST)
@SOME
@given(seed=SEEDS)
def test_i1_every_bridge_in_a_rollout_of_anything_is_the_end_of_a_fresh_rendering(name: str, seed: int) -> None:
    trajectory = play(name, seed)
    assert trajectory.error is None
    messages, renderer = list(trajectory.messages), renderer_and_tokenizer(name)[0]
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    for turn, end in zip(trajectory.turns[1:], turns[1:], strict=True):
        if isinstance(turn.bridge, Bridge):
            assert is_exact(renderer, turn.bridge, messages[:end]) is not False
