"""The two history policies in rollouts: what the model sees of its earlier reasoning, and what is trained."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from support.conversations import FAMILIES
from support.rollouts import play
from support.scripted_env import ScriptedEnv
from unbroken.engines.scripted import ScriptedEngine
from unbroken.ledger.nodes import ForkReason
from unbroken.ledger.tree import export_samples
from unbroken.rendering.base import HistoryPolicy, RefusalReason
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.env import Continue
from unbroken.rollout.trajectory import Trajectory

TOKENIZER = FAMILIES["qwen_thinking"].tokenizer()
CALL = '<tool_call>\n{"name":"look","arguments":{"row":1}}\n</tool_call>'
FIRST, SECOND, THIRD, FOURTH = (
    "<think>\nfirst thought\n</think>\n\nHello<|im_end|>",
    f"<think>\nsecond thought\n</think>\n\n{CALL}<|im_end|>",
    "<think>\nthird thought\n</think>\n\n42<|im_end|>",
    "Bye<|im_end|>",
)
THOUGHTS = ("first thought", "second thought", "third thought")


def user(text: str) -> Continue:
    return Continue(messages=[{"role": "user", "content": text}])


ANSWER = Continue(messages=[{"role": "tool", "content": "42", "tool_call_id": "call00000"}])


async def converse(
    policy: HistoryPolicy, replies: Sequence[str], outcomes: Sequence[Any]
) -> tuple[Trajectory, list[str], list[list[int]]]:
    """The trajectory, and the prompts that the engine got, as text and as ids."""
    engine = ScriptedEngine([TOKENIZER.encode(reply) for reply in replies], allow_forks=True)
    renderer = TemplateRenderer(TOKENIZER, history=policy)
    trajectory = await play(ScriptedEnv(outcomes), engine, renderer=renderer)
    assert trajectory.error is None
    prompts = [request.prompt_ids for request in engine.requests]
    return trajectory, [TOKENIZER.decode(ids) for ids in prompts], [ids.tolist() for ids in prompts]


def seen(prompt: str) -> list[str]:
    return [thought for thought in THOUGHTS if thought in prompt]


EPISODE = ([FIRST, SECOND, THIRD, FOURTH], [user("Look up row 1."), ANSWER, user("Thanks.")])


async def test_i1_exact_is_one_sample_in_which_the_model_goes_on_seeing_all_its_reasoning():
    trajectory, prompts, _ = await converse(HistoryPolicy.EXACT, *EPISODE)
    assert [seen(prompt) for prompt in prompts] == [[], [*THOUGHTS[:1]], [*THOUGHTS[:2]], [*THOUGHTS]]
    [row] = export_samples(trajectory.tree, 1.0)
    assert row.token_ids[row.loss_mask].tolist() == [i for reply in EPISODE[0] for i in TOKENIZER.encode(reply)]
    assert all(turn.fork is None for turn in trajectory.turns)


async def test_i8_exact_counts_how_often_the_template_would_have_rewritten():
    trajectory, _, _ = await converse(HistoryPolicy.EXACT, *EPISODE)
    assert trajectory.counters.as_dict() == {
        "bridges/derived": 3,
        "history/drops_reasoning": 2,
        "history/kept": 1,
        "status/completed": 1,
    }


async def test_i1_template_drops_earlier_reasoning_and_forks_at_each_user_message():
    trajectory, prompts, _ = await converse(HistoryPolicy.TEMPLATE, *EPISODE)
    assert [seen(prompt) for prompt in prompts] == [[], [], ["second thought"], []]
    forks = [turn.fork for turn in trajectory.turns]
    assert forks == [None, ForkReason.TEMPLATE_REWRITES, None, ForkReason.TEMPLATE_REWRITES]
    assert trajectory.counters.as_dict() == {
        "bridges/derived": 1,
        "forks/template_rewrites": 2,
        "history/kept": 1,
        f"refusals/{RefusalReason.REWRITES_HISTORY}": 2,
        "status/completed": 1,
    }


async def test_template_asks_with_what_the_template_renders_whenever_a_user_speaks():
    trajectory, _, prompt_ids = await converse(HistoryPolicy.TEMPLATE, *EPISODE)
    renderer = TemplateRenderer(TOKENIZER)
    for k, num_messages in ((0, 1), (1, 3), (3, 7)):
        assert prompt_ids[k] == renderer.render(trajectory.messages[:num_messages]).token_ids.tolist()


SHARING = ([FOURTH, FIRST, FOURTH], [user("Hello?"), user("Well?")])
"""The first turn has no reasoning to drop: its ids are in both branches."""


@pytest.mark.parametrize(
    ("policy", "episode", "rows_of_turns"),
    [
        (HistoryPolicy.EXACT, EPISODE, [0, 0, 0, 0]),
        (HistoryPolicy.TEMPLATE, EPISODE, [0, 1, 1, 2]),
        (HistoryPolicy.EXACT, SHARING, [0, 0, 0]),
        (HistoryPolicy.TEMPLATE, SHARING, [0, 0, 1]),
    ],
)
async def test_i2_every_sampled_id_is_trained_once_and_in_the_context_it_was_sampled_in(policy, episode, rows_of_turns):
    trajectory, _, prompt_ids = await converse(policy, *episode)
    rows = export_samples(trajectory.tree, 1.0)
    assert sum(int(row.loss_mask.sum()) for row in rows) == trajectory.num_sampled
    trained_in = []
    for prompt, turn in zip(prompt_ids, trajectory.turns, strict=True):
        start, stop = len(prompt), len(prompt) + len(turn.sequence.completion_ids)
        trained_in += [
            k
            for k, row in enumerate(rows)
            if row.token_ids[:stop].tolist() == [*prompt, *turn.sequence.completion_ids.tolist()]
            and row.loss_mask[start:stop].all()
            and np.array_equal(row.rollout_logprobs[start:stop], turn.sequence.rollout_logprobs)
        ]
    assert trained_in == rows_of_turns


async def test_a_turn_without_reasoning_is_kept_by_the_template_and_bridged():
    trajectory, _, prompt_ids = await converse(HistoryPolicy.TEMPLATE, [FOURTH, FOURTH], [user("Hello?")])
    assert trajectory.turns[1].fork is None
    assert trajectory.counters.as_dict() == {"bridges/derived": 1, "history/kept": 1, "status/completed": 1}
    first = [*prompt_ids[0], *TOKENIZER.encode(FOURTH)]
    assert prompt_ids[1][: len(first)] == first
    assert len(export_samples(trajectory.tree, 1.0)) == 1


async def test_a_turn_cut_in_its_reasoning_leaves_nothing_of_it_to_a_later_prompt_under_template():
    cut = "<think>\nfirst thought"
    for policy, thoughts in ((HistoryPolicy.EXACT, ["first thought"]), (HistoryPolicy.TEMPLATE, [])):
        trajectory, prompts, _ = await converse(policy, [cut, FOURTH], [user("Well?")])
        assert seen(prompts[1]) == thoughts
        assert sum(int(row.loss_mask.sum()) for row in export_samples(trajectory.tree, 1.0)) == trajectory.num_sampled
