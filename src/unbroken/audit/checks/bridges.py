"""Judges bridges over random conversations."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from unbroken.audit.conversations import TOOLS, ConversationMaker
from unbroken.audit.judge import Judgement, judge_bridge
from unbroken.audit.report import FuzzFinding, RefusedShare
from unbroken.audit.subject import Subject

_NUM_EXAMPLES = 3


def find_bridges(
    subject: Subject, *, seed: int, num_conversations: int, max_calls: int, with_system: bool = True
) -> FuzzFinding:
    """Judge `num_conversations` bridges. Every other conversation without calls is rendered without tools."""
    maker = ConversationMaker(
        seed=seed,
        max_calls=max_calls,
        with_reasoning=subject.facts.message_format.reasoning_key is not None,
        with_system=with_system,
    )
    judgements: Counter[Judgement] = Counter()
    not_accepted: Counter[str] = Counter()
    refused: dict[str, list[tuple[str, str]]] = {}
    wrong: list[str] = []
    for number, conversation in enumerate(islice(maker.draw_conversations(), num_conversations)):
        situation = str(conversation.situation)
        tools = () if conversation.situation.num_calls == 0 and number % 2 else TOOLS
        judged = judge_bridge(subject, conversation, tools)
        judgements[judged.judgement] += 1
        if judged.judgement is Judgement.NOT_ACCEPTED:
            not_accepted[situation] += 1
        if judged.refusal is not None:
            refused.setdefault(judged.refusal.reason.value, []).append((situation, judged.detail))
        if judged.judgement is Judgement.WRONG:
            wrong.append(f"{situation}: {judged.detail}")
    return FuzzFinding(
        num_conversations=num_conversations,
        num_exact=judgements[Judgement.EXACT],
        num_wrong=judgements[Judgement.WRONG],
        num_unjudged=judgements[Judgement.UNJUDGED],
        not_accepted=dict(sorted(not_accepted.items())),
        refused=tuple(_summarise(reason, cases) for reason, cases in sorted(refused.items())),
        wrong=tuple(wrong[:_NUM_EXAMPLES]),
    )


def _summarise(reason: str, cases: list[tuple[str, str]]) -> RefusedShare:
    situations = tuple(sorted({situation for situation, _ in cases}))
    return RefusedShare(reason=reason, num=len(cases), situations=situations, detail=cases[0][1])
