"""What is lost where only the new messages are rendered and put behind the sampled turn, as some systems do."""

from __future__ import annotations

import difflib

from unbroken.audit.completions import completion_text
from unbroken.audit.conversations import TOOLS, Conversation, ConversationMaker, Following, Situation
from unbroken.audit.report import BoundaryFinding, Token
from unbroken.audit.subject import Subject
from unbroken.rendering.base import Refusal
from unbroken.types import token_ids

_SITUATIONS = (
    Situation(num_calls=0, has_text=True, following=Following.USER),
    Situation(num_calls=1, has_text=False, following=Following.RESULTS),
)


def find_boundaries(subject: Subject, *, most_calls: int) -> tuple[BoundaryFinding, ...]:
    """One finding for each usual boundary."""
    maker = ConversationMaker(seed=1, most_calls=most_calls, with_reasoning=False)
    return tuple(
        _compare(subject, maker.make(situation, with_history=False))
        for situation in _SITUATIONS
        if situation.num_calls <= most_calls
    )


def _compare(subject: Subject, conversation: Conversation) -> BoundaryFinding:
    situation, tools = str(conversation.situation), TOOLS if conversation.situation.num_calls else ()
    new = conversation.new_messages
    sampled = completion_text(subject, conversation.history, conversation.turn, tools=tools, then=new[0]["role"])
    completion = [] if sampled is None else subject.encode(sampled.body + sampled.stop)
    prompt = [] if sampled is None else subject.encode(sampled.prompt)
    outcome = subject.renderer.bridge_to_next_turn(
        token_ids(prompt),
        token_ids(completion),
        new,
        assistant=conversation.turn,
        tools=tools,
        earlier=conversation.history,
    )
    if isinstance(outcome, Refusal):
        return BoundaryFinding(situation=situation, outcome="refused")
    alone = subject.text(new, generation_prompt=True)
    if alone is None:
        return BoundaryFinding(situation=situation, outcome="raises")
    if any(mark not in alone for mark in conversation.new_marks):
        return BoundaryFinding(situation=situation, outcome="drops")
    bridge, naive = outcome.bridge_ids.tolist(), subject.encode(alone)
    lost: list[int] = []
    added: list[int] = []
    for _, i, j, k, m in _changes(bridge, naive):
        lost += bridge[i:j]
        added += naive[k:m]
    return BoundaryFinding(
        situation=situation,
        outcome="different" if lost or added else "same",
        lost=_tokens(subject, lost),
        added=_tokens(subject, added),
    )


def _changes(before: list[int], after: list[int]) -> list[tuple[str, int, int, int, int]]:
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [code for code in codes if code[0] != "equal"]


def _tokens(subject: Subject, ids: list[int]) -> tuple[Token, ...]:
    return tuple(Token(token_id=i, text=text) for i, text in zip(ids, subject.texts(ids), strict=True))
