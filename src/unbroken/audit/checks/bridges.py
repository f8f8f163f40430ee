r"""Judges bridges over random conversations, each by a rendering of the whole, which must end with the bridge.

    last    ..assistant\nSo: yes said01<|im_end|>\n                            the conversation up to the turn
    full    ..assistant\nSo: yes said01<|im_end|>\n<|im_start|>user\nhi new02<|im_end|>\n<|im_start|>assistant\n
                                      `- X stop    `---------------- expected --------------------------------´

The end of the turn is found in both by the turn's last mark; the text between the mark and the stop (X) must be the
same but for white space. Where the template keeps the history as it is, prompt + turn + bridge must also be the full
text from its first character on, which does not depend on how the end of the turn was found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

from unbroken.audit.config import AuditConfig
from unbroken.audit.conversations import TOOLS, AuditConversation, ConversationMaker
from unbroken.audit.report import FuzzFinding, RefusedShare
from unbroken.audit.subject import Subject
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import Bridge, Closing, HistoryEffect, Refusal, RefusalReason
from unbroken.rendering.facts import AddedTokens, TokenMatch, TurnEnds
from unbroken.reports import shorten
from unbroken.types import token_ids

_NUM_EXAMPLES = 3


class Judgement(StrEnum):
    """The outcome for one conversation."""

    EXACT = "exact"
    REFUSED = "refused"
    WRONG = "wrong"
    NOT_ACCEPTED = "not_accepted"
    """The template itself raises, or leaves out the turn or a new message: there is nothing to compare with."""
    UNJUDGED = "unjudged"
    """The template ends the turn differently once other messages follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _JudgedCase:
    """A judgement; `detail` explains a refusal or a wrong bridge."""

    judgement: Judgement
    detail: str = ""
    refusal: Refusal | None = None
    history: HistoryEffect | None = None
    """The template's effect on everything before (P2); None without a bridge, or if it is not known."""


def find_bridges(subject: Subject, config: AuditConfig, *, max_calls: int, with_system: bool = True) -> FuzzFinding:
    """Judge a bridge of each conversation. Every other conversation without calls is rendered without tools."""
    maker = ConversationMaker(
        seed=config.seed, max_calls=max_calls, with_reasoning=subject.renders_reasoning, with_system=with_system
    )
    cases: list[tuple[str, _JudgedCase]] = []
    history: dict[str, Counter[str]] = {}
    for number, conversation in enumerate(islice(maker.draw_conversations(), config.num_conversations)):
        tools = () if conversation.situation.num_calls == 0 and number % 2 else TOOLS
        case = _judge_bridge(subject, conversation, tools)
        cases.append((str(conversation.situation), case))
        if case.history is not None:
            history.setdefault(_name_follower(conversation.new_messages), Counter())[case.history.value] += 1
    return _count_cases(cases, history)


def _name_follower(new_messages: Sequence[Message]) -> str:
    """The role by which effects on the history are counted: a system message anywhere, or the last message."""
    roles = [message["role"] for message in new_messages]
    return "system" if "system" in roles else roles[-1]


def _count_cases(cases: Sequence[tuple[str, _JudgedCase]], history: Mapping[str, Counter[str]]) -> FuzzFinding:
    """Count the cases, each with its situation; `history` are effects by the role that follows."""
    judgements = Counter(case.judgement for _, case in cases)
    not_accepted = Counter(situation for situation, case in cases if case.judgement is Judgement.NOT_ACCEPTED)
    reasons = sorted({case.refusal.reason for _, case in cases if case.refusal is not None})
    wrong = [f"{situation}: {case.detail}" for situation, case in cases if case.judgement is Judgement.WRONG]
    return FuzzFinding(
        num_conversations=len(cases),
        num_exact=judgements[Judgement.EXACT],
        num_wrong=judgements[Judgement.WRONG],
        num_unjudged=judgements[Judgement.UNJUDGED],
        history={follows: dict(sorted(counts.items())) for follows, counts in sorted(history.items())},
        not_accepted=dict(sorted(not_accepted.items())),
        refused=tuple(_summarise(reason, cases) for reason in reasons),
        wrong=tuple(wrong[:_NUM_EXAMPLES]),
    )


def _summarise(reason: RefusalReason, cases: Sequence[tuple[str, _JudgedCase]]) -> RefusedShare:
    found = [(situation, c.detail) for situation, c in cases if c.refusal is not None and c.refusal.reason is reason]
    situations = tuple(sorted({situation for situation, _ in found}))
    return RefusedShare(reason=reason.value, num=len(found), situations=situations, detail=found[0][1])


def _judge_bridge(subject: Subject, conversation: AuditConversation, tools: Sequence[ToolSchema]) -> _JudgedCase:
    """Bridge the conversation with the renderer under audit, and compare the bridge with the whole rendering."""
    ends = subject.facts.turn_ends
    texts = _render(subject, conversation, tools)
    if isinstance(texts, str):
        return _JudgedCase(judgement=Judgement.NOT_ACCEPTED, detail=texts)
    if isinstance(ends, Refusal):
        return _JudgedCase(judgement=Judgement.REFUSED, detail=ends.detail, refusal=ends)
    stop = _find_stop(subject.facts.control_tokens, ends, texts.shown, texts.last, texts.full)
    if stop is None:
        return _JudgedCase(judgement=Judgement.UNJUDGED, detail="nothing ends the turn")
    turn = texts.last[: stop.end_in_last] + ("" if stop.is_in_last else stop.token)
    given = (
        token_ids(subject.encode(texts.prompt)),
        token_ids(subject.encode(turn.removeprefix(texts.prompt))),
        conversation.new_messages,
    )
    known: dict[str, Any] = {"assistant": conversation.turn, "tools": tools, "earlier": conversation.history}
    outcome = own = subject.renderer.bridge_to_next_turn(*given, **known)
    if subject.renderer is not subject.template_renderer:
        own = subject.template_renderer.bridge_to_next_turn(*given, **known)
    history = own.history if isinstance(own, Bridge) else None
    if isinstance(outcome, Refusal):
        return _JudgedCase(judgement=Judgement.REFUSED, detail=outcome.detail, refusal=outcome)
    if stop.end_in_full is None:
        return _JudgedCase(judgement=Judgement.UNJUDGED, detail="the turn ends differently later on", history=history)
    fault = _find_fault(subject, outcome, turn, texts.full, stop.end_in_full)
    return _JudgedCase(judgement=Judgement.WRONG if fault else Judgement.EXACT, detail=fault, history=history)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Texts:
    """What the template writes for a conversation."""

    prompt: str
    """For what came before the turn."""
    last: str
    """With the turn, and nothing after it."""
    full: str
    """With the turn, and the prompt of the next one."""
    shown: Sequence[str]
    """The marks of the turn that are in `last`: a template may leave out its reasoning."""


def _render(subject: Subject, conversation: AuditConversation, tools: Sequence[ToolSchema]) -> _Texts | str:
    """Render the conversation; or say why the template does not take it."""
    prompt = subject.render_text(conversation.history, tools=tools, add_generation_prompt=True)
    full = subject.render_text(conversation.messages, tools=tools, add_generation_prompt=True)
    last = subject.render_text([*conversation.history, conversation.turn], tools=tools)
    if prompt is None or full is None or last is None:
        return "the template raises"
    shown = [mark for mark in conversation.turn_marks if mark in last]
    if not shown or any(mark not in full for mark in (*shown, *conversation.new_marks)):
        return "the template leaves out the turn or a new message"
    return _Texts(prompt=prompt, last=last, full=full, shown=shown)


def _find_fault(subject: Subject, bridge: Bridge, turn: str, full: str, end_in_full: int) -> str:
    """What is wrong with a bridge after a turn that ends there in the whole text; "" if nothing is."""
    fault = _find_text_fault(subject, bridge, full[end_in_full:]) or _find_id_fault(subject, bridge, full)
    if not fault and full.startswith(turn) and full != turn + subject.decode(bridge.bridge_ids.tolist()):
        fault = f"prompt, turn and bridge are not the whole text, which ends with {_quote(full)}"
    return fault


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop:
    """The token that the model samples to end a turn, and its positions."""

    token: str
    is_in_last: bool
    """The template writes it when nothing follows; otherwise it is the next message's header."""
    end_in_last: int
    """The position after the token, or the end of the text."""
    end_in_full: int | None
    """The position after the token, or after the one used in mid-conversation; None if it is not at its place."""


def _find_stop(control: AddedTokens, ends: TurnEnds, marks: Sequence[str], last: str, full: str) -> _Stop | None:
    said_in_last, said_in_full = (max(text.rfind(mark) + len(mark) for mark in marks) for text in (last, full))
    stops = _list_tokens(control, last, said_in_last, ends.stops)
    last = last[: stops[0].stop] if stops else last  # sampling ends there, though the template may write more
    in_last = _list_tokens(control, last, said_in_last, ends.tokens)
    in_full = _list_tokens(control, full, said_in_full, ends.tokens)
    ends_itself = bool(in_last) and not last[in_last[-1].stop :].strip()
    if ends.headers or not ends_itself:
        if not in_full:
            return None
        header = in_full[0]
        # A header in `last` may be a different one: that of the message which the template expects next.
        end_in_last = in_last[-1].start if ends_itself else len(last)
        return _Stop(token=header.token, is_in_last=False, end_in_last=end_in_last, end_in_full=header.stop)
    written_by_text = {tuple(full[said_in_full : match.start].split()): match for match in reversed(in_full)}
    for stop in reversed(in_last):
        written = written_by_text.get(tuple(last[said_in_last : stop.start].split()))
        if written is not None:
            return _Stop(token=stop.token, is_in_last=True, end_in_last=stop.stop, end_in_full=written.stop)
    stop = in_last[-1]
    return _Stop(token=stop.token, is_in_last=True, end_in_last=stop.stop, end_in_full=None)


def _list_tokens(control: AddedTokens, text: str, start: int, tokens: Collection[str]) -> list[TokenMatch]:
    return [match for match in control.find(text, start) if match.token in tokens]


def _find_text_fault(subject: Subject, bridge: Bridge, expected: str) -> str:
    written = subject.decode(bridge.bridge_ids.tolist())
    if bridge.closing is not Closing.NONE or bridge.num_taken_back:
        return f"the turn was whole, and the bridge closes it ({bridge.closing}, {bridge.num_taken_back} taken back)"
    return "" if written == expected else f"the template writes {_quote(expected)}, the bridge {_quote(written)}"


def _find_id_fault(subject: Subject, bridge: Bridge, full: str) -> str:
    ids = bridge.bridge_ids.tolist()
    encoded = subject.encode(full)
    return "" if encoded[len(encoded) - len(ids) :] == ids else "the text is right but its ids are not the tokenizer's"


def _quote(text: str) -> str:
    return repr(shorten(text, 160, num_last=79))
