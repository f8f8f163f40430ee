"""Finds the ids lost when only the new messages are rendered and appended to a sampled turn, as some systems do."""

from __future__ import annotations

import difflib

from unbroken.audit.completions import make_completion
from unbroken.audit.conversations import TOOLS, Conversation, ConversationMaker, Following, Situation
from unbroken.audit.report import BoundaryFinding
from unbroken.audit.subject import Subject
from unbroken.rendering.base import Refusal
from unbroken.types import token_ids

_SITUATIONS = (
    Situation(num_calls=0, has_text=True, following=Following.USER),
    Situation(num_calls=1, has_text=False, following=Following.RESULTS),
)


def find_boundaries(subject: Subject, *, max_calls: int) -> tuple[BoundaryFinding, ...]:
    """Compare appending with the bridge at the two usual boundaries."""
    maker = ConversationMaker(seed=1, max_calls=max_calls, with_reasoning=False)
    return tuple(
        _compare(subject, maker.make_conversation(situation, with_history=False))
        for situation in _SITUATIONS
        if situation.num_calls <= max_calls
    )


def _compare(subject: Subject, conversation: Conversation) -> BoundaryFinding:
    situation, tools = str(conversation.situation), TOOLS if conversation.situation.num_calls else ()
    new = conversation.new_messages
    sampled = make_completion(subject, conversation.history, conversation.turn, tools=tools, next_role=new[0]["role"])
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
    alone = subject.render_text(new, add_generation_prompt=True)
    if alone is None:
        return BoundaryFinding(situation=situation, outcome="raises")
    if any(mark not in alone for mark in conversation.new_marks):
        return BoundaryFinding(situation=situation, outcome="drops")
    bridge, appended = outcome.bridge_ids.tolist(), subject.encode(alone)
    lost: list[int] = []
    added: list[int] = []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, bridge, appended, autojunk=False).get_opcodes():
        if kind != "equal":
            lost += bridge[i:j]
            added += appended[k:m]
    return BoundaryFinding(
        situation=situation,
        outcome="different" if lost or added else "same",
        lost=subject.get_tokens(lost),
        added=subject.get_tokens(added),
    )
