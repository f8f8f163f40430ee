"""I1, I7: however a turn ended, what follows it is what a fresh rendering of the whole conversation writes."""

import asyncio
import functools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import templates
from support.conversations import FAMILIES, TOOLS, WORDS, Family, random_conversation
from support.effort import num_cases
from support.exact_bridges import is_exact
from support.scripted_env import ScriptedEnv
from unbroken.engines.scripted import ScriptedEngine
from unbroken.messages import Message
from unbroken.rendering.base import Bridge, Closing
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.env import Continue
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.trajectory import Trajectory
from unbroken.types import SamplingParams

HONEST = {**FAMILIES, "names by id": Family(templates.LOOKS_UP_NAMES_BY_ID)}
SEEDS = st.integers(0, 2**32)
MANY = settings(max_examples=num_cases(60), derandomize=True, deadline=None, database=None)
SOME = settings(max_examples=num_cases(30), derandomize=True, deadline=None, database=None)
FOREIGN = "<|endoftext|>"


@functools.cache
def renderer_and_tokenizer(name: str) -> tuple[TemplateRenderer, Any]:
    tokenizer = HONEST[name].tokenizer()
    return TemplateRenderer(tokenizer), tokenizer


def forging_words(tokenizer: Any) -> tuple[str, ...]:
    control = list(tokenizer.get_added_vocab())
    return (*WORDS[:8], *control, *(token[: len(token) // 2] for token in control))


def random_case(name: str, seed: int) -> tuple[list[Message], Bridge] | None:
    """The bridge after a turn that ended in any way: whole, cut, by another model's stop, by a wrong header."""
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
    if not isinstance(bridge, Bridge):
        return None
    return [*conversation.history, message, *new], bridge


@pytest.mark.parametrize("name", HONEST)
@MANY
@given(seed=SEEDS)
def test_i1_a_bridge_after_any_ending_is_the_end_of_a_fresh_rendering(name: str, seed: int) -> None:
    case = random_case(name, seed)
    if case is not None:
        assert is_exact(renderer_and_tokenizer(name)[0], case[1], case[0], TOOLS) is not False


def test_the_cases_hold_every_kind_of_ending_and_almost_all_can_be_compared() -> None:
    closings: Counter[Closing] = Counter()
    outcomes: Counter[bool | None] = Counter()
    taken_back = 0
    for name in HONEST:
        for seed in range(120):
            if (case := random_case(name, seed)) is not None:
                closings[case[1].closing] += 1
                taken_back += case[1].num_taken_back
                outcomes[is_exact(renderer_and_tokenizer(name)[0], case[1], case[0], TOOLS)] += 1
    assert all(closings[closing] >= 10 for closing in Closing), closings
    assert taken_back > 10
    assert outcomes[True] > 0.9 * outcomes.total()


@pytest.mark.parametrize("name", HONEST)
@SOME
@given(seed=SEEDS)
def test_the_judge_takes_no_bridge_that_is_wrong_by_one_id_for_right(name: str, seed: int) -> None:
    case = random_case(name, seed)
    if case is None or case[1].closing is not Closing.NONE:
        return
    messages, bridge = case
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
