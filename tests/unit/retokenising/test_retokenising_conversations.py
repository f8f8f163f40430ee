"""Conversations written by hand, through rollout loop, template, tokenizer and the usual pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from support import templates
from support.audits import subject_of
from support.dialogues import Dialogue
from unbroken.audit.subject import Subject
from unbroken.engines.scripted import ScriptedEngine, ScriptedReply
from unbroken.retokenising.changes import Cause
from unbroken.retokenising.comparison import Retokenised, compare_trajectory
from unbroken.retokenising.ratios import pair_logprobs, score_rollouts
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.types import FinishReason, SamplingParams

TRIMS = templates.QWEN.replace(
    "+ message.content -}}\n    {%- for call", "+ message.content | trim -}}\n    {%- for call"
)
DROPS = templates.QWEN.replace(
    "+ message.content -}}\n    {%- for call", "+ ('' if message.tool_calls else message.content) -}}\n    {%- for call"
)
assert TRIMS != templates.QWEN != DROPS
FORGETS = templates.QWEN.replace(
    "+ message.content -}}\n    {%- for call", "+ (message.content if loop.last else 'Said.') -}}\n    {%- for call"
)
USER = [{"role": "user", "content": "What is the value?"}]
RESULTS = {"raka": {"value": "pemi"}}
SPACED = '<tool_call>\n{"name": "lookup", "arguments": {"key": "raka"}}\n</tool_call>'
COMPACT = '<tool_call>\n{"name":"lookup","arguments":{"key":"raka"}}\n</tool_call>'
END = "<|im_end|>"
THINKING = "<think>\nHm.\n</think>\n\n"
ANSWER = f"It is known.{END}"


def split(subject: Subject, text: str) -> list[int]:
    """The ids of a text, one for each character: not as the tokenizer spells it."""
    return [i for character in text for i in subject.encode(character)]


async def compare(
    subject: Subject, replies: Sequence[Any], *, follow_ups: Sequence[str] = (), max_tokens: int = 200
) -> Retokenised:
    script = [subject.encode(reply) if isinstance(reply, str) else reply for reply in replies]
    trajectory = await run_rollout(
        Dialogue(USER, RESULTS, follow_ups),
        engine=ScriptedEngine(script, allow_forks=True),
        renderer=subject.renderer,
        sampling=SamplingParams(max_tokens=max_tokens),
        limits=Limits(max_turns=6),
    )
    assert trajectory.error is None
    assert len(trajectory.turns) == len(replies)
    compared = compare_trajectory(subject, trajectory)
    assert compared is not None
    return compared


@pytest.mark.parametrize(
    ("source", "replies", "follow_ups", "expected"),
    [
        (templates.QWEN, [SPACED + END, ANSWER], [], set()),
        (templates.QWEN, [COMPACT + END, ANSWER], [], {Cause.RESERIALISED_CALL}),
        (templates.QWEN, [f"Now.  \n\n{SPACED}{END}", ANSWER], [], {Cause.STRIPPED_SPACE}),
        (TRIMS, [f"  It is known.{END}"], [], {Cause.STRIPPED_SPACE}),
        (templates.QWEN_THINKING, [THINKING + SPACED + END, ANSWER], [], set()),
        (templates.QWEN_THINKING, [THINKING + ANSWER, ANSWER], ["Sure?"], {Cause.DROPPED_REASONING}),
        (templates.QWEN, [ANSWER, ANSWER], ["Sure?"], set()),
        (DROPS, [f"Let me see.\n{SPACED}{END}", ANSWER], [], {Cause.REWRITTEN}),
        (templates.QWEN, ["It is known.<|endoftext|>"], [], {Cause.TURN_END}),
        (templates.QWEN, ["<tool_call>\n{broken\n</tool_call>" + END, ANSWER], [], set()),
    ],
    ids=["same", "compact", "before a call", "trimmed", "kept reasoning", "dropped reasoning", "two questions",
         "rewritten", "other stop", "a call that cannot be read"],
)  # fmt: skip
async def test_the_cause_of_a_conversation_is_found(
    source: str, replies: list[str], follow_ups: list[str], expected: set[Cause]
) -> None:
    compared = await compare(subject_of(source), replies, follow_ups=follow_ups)
    assert compared.causes == expected
    assert compared.differs == bool(expected)
    assert bool(compared.count_changed_ids()) == bool(expected)
    assert np.array_equal(compared.token_ids, compared.retokenised_ids) == (not expected)


async def test_a_word_spelled_in_letters_is_a_bpe_split() -> None:
    subject = subject_of(templates.QWEN)
    spelled = [*split(subject, "known"), *subject.encode(END)]
    compared = await compare(subject, [SPACED + END, spelled])
    assert compared.causes == {Cause.BPE_SPLIT}
    assert [sum(map(turn.touches, compared.changes)) for turn in compared.turns] == [0, 1]
    assert compared.count_changed_ids() == compared.count_changed_ids(Cause.BPE_SPLIT) <= len("known")


async def test_a_cut_turn_gets_an_end_that_was_not_sampled() -> None:
    subject = subject_of(templates.QWEN)
    cut = ScriptedReply(completion_ids=subject.encode("It is known"), finish_reason=FinishReason.LENGTH)
    compared = await compare(subject, [cut], max_tokens=len(subject.encode("It is known")))
    assert compared.causes == {Cause.TURN_END}
    assert compared.count_changed_ids() == 0, "all sampled ids are still there"
    assert compared.retokenised_ids.tolist() == [*compared.token_ids.tolist(), *subject.encode(END)]


async def test_turns_before_a_fork_are_left_out_and_counted() -> None:
    compared = await compare(subject_of(FORGETS), [ANSWER, ANSWER], follow_ups=["Sure?"])
    assert (len(compared.turns), compared.num_turns_left_out) == (1, 1)
    assert compared.turns[0].start > len(compared.token_ids) // 2


async def test_one_id_less_is_no_stretch_to_train_on_and_a_replaced_one_is_one_ratio() -> None:
    subject = subject_of(templates.QWEN)
    compared = await compare(subject, [[*split(subject, "known"), *subject.encode(END)]])
    num_ids, num_sampled = len(compared.token_ids), int(compared.sampled_mask.sum())
    exact = list(pair_logprobs(compared, np.full(num_ids, -0.5), ()))
    assert len(exact) == num_sampled
    gaps = [change.gap for change in compared.changes]
    pairs = list(pair_logprobs(compared, np.full(len(compared.retokenised_ids), -0.5), gaps))
    assert len(pairs) < num_sampled
    assert {trained for trained, _ in pairs} == {-0.5 * (gap.after[1] - gap.after[0]) for gap in gaps} | {-0.5}


async def test_equal_logprobs_give_ratios_of_one_where_nothing_changed() -> None:
    subject = subject_of(templates.QWEN)
    compared = await compare(subject, [SPACED + END, ANSWER])
    ratios = await score_rollouts([compared], ScriptedEngine([]), temperature=1.0)
    assert ratios.exact is not None
    assert ratios.exact == ratios.retokenised
    assert (ratios.exact.k3, ratios.exact.share_off_20pct, ratios.num_unscored) == (0, 0, 0)
    short = await score_rollouts([compared], ScriptedEngine([], context_length=8), temperature=1.0)
    assert (short.exact, short.num_unscored) == (None, 1)
