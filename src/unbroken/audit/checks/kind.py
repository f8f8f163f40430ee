"""The class of a template: what it does to what came before, and what of a conversation it does not carry."""

from __future__ import annotations

from collections.abc import Iterator

from unbroken.audit.conversations import TOOLS, Conversation, ConversationMaker, Following, Situation
from unbroken.audit.report import KindFinding, TemplateKind, Trait
from unbroken.audit.subject import Subject
from unbroken.errors import TemplateError
from unbroken.messages import Message
from unbroken.rendering.base import Bridge, HistoryEffect, Refusal
from unbroken.rendering.message_format import PROBE_NAMES, probe_call
from unbroken.types import token_ids

_TEXT_THEN_USER = Situation(num_calls=0, has_text=True, following=Following.USER)
_CALL_THEN_RESULT = Situation(num_calls=1, has_text=False, following=Following.RESULTS)
_SYSTEM, _USER, _TEXT, _RESULT = "Zq8System", "Zq8User", "Zq8Text", "Zq8Result"


def find_kind(subject: Subject) -> KindFinding:
    """Bridge a few usual turns with the template's own renderer, and render a few probes."""
    traits = tuple(_traits(subject))
    if isinstance(subject.ends, Refusal):
        detail = _fault(subject) or subject.ends.detail
        return KindFinding(kind=TemplateKind.UNDERIVABLE, traits=traits, detail=detail)
    maker = ConversationMaker(seed=0, most_calls=1, with_reasoning=subject.message_format.reasoning_key is not None)
    after_user = _effects(subject, maker, _TEXT_THEN_USER)
    after_result = _effects(subject, maker, _CALL_THEN_RESULT) if subject.message_format.renders_calls else []
    found = [effect for effect in (*after_user, *after_result) if not isinstance(effect, Refusal)]
    if not found:
        refusals = [effect for effect in after_user if isinstance(effect, Refusal)]
        return KindFinding(kind=TemplateKind.UNDERIVABLE, traits=traits, detail=refusals[0].detail)
    kind = TemplateKind.APPEND_ONLY
    if HistoryEffect.DROPS_REASONING in after_user:
        kind = TemplateKind.STRIPS_REASONING_ON_USER
    if HistoryEffect.DROPS_REASONING in after_result:
        kind = TemplateKind.STRIPS_REASONING
    if HistoryEffect.REWRITTEN in found:
        kind = TemplateKind.REWRITES_HISTORY
    return KindFinding(kind=kind, traits=traits)


def most_calls(traits: tuple[Trait, ...]) -> int:
    """How many calls in one turn the template carries, 3 standing for any number."""
    if Trait.RENDERS_NO_CALLS in traits or Trait.REFUSES_RESULTS in traits or Trait.DROPS_RESULTS in traits:
        return 0
    return 1 if {Trait.REFUSES_PARALLEL_CALLS, Trait.DROPS_PARALLEL_CALLS} & set(traits) else 3


def _fault(subject: Subject) -> str:
    """What the template says to one short question; empty if it renders it."""
    try:
        user: Message = {"role": "user", "content": _USER}
        subject.template.render(subject.message_format.convert([user]), add_generation_prompt=True)
    except TemplateError as error:
        return str(error)
    return ""


def _effects(subject: Subject, maker: ConversationMaker, situation: Situation) -> list[HistoryEffect | Refusal]:
    """The effect after a turn without and with reasoning."""
    return [
        _effect(subject, maker.make(situation, with_history=False, with_reasoning=reasons)) for reasons in (False, True)
    ]


def _effect(subject: Subject, conversation: Conversation) -> HistoryEffect | Refusal:
    stops = subject.template_renderer.get_stop_token_ids()
    outcome = subject.template_renderer.bridge_to_next_turn(
        token_ids([]),
        token_ids(stops[:1]),
        conversation.new_messages,
        assistant=conversation.turn,
        tools=TOOLS,
        earlier=conversation.history,
    )
    if isinstance(outcome, Bridge):
        assert outcome.history is not None
        return outcome.history
    return outcome


def _traits(subject: Subject) -> Iterator[Trait]:
    user: Message = {"role": "user", "content": _USER}
    system: Message = {"role": "system", "content": _SYSTEM}
    text: Message = {"role": "assistant", "content": _TEXT}
    renders_calls = subject.message_format.renders_calls
    if (subject.text([user], tools=TOOLS) or "") == (subject.text([user]) or ""):
        yield Trait.IGNORES_TOOLS
    if not renders_calls:
        yield Trait.RENDERS_NO_CALLS
    calls = [_turn_of_calls(1), *_results(1)] if renders_calls else [text, *_results(1)]
    answered = subject.text([user, *calls], tools=TOOLS, generation_prompt=True)
    if answered is None:
        yield Trait.REFUSES_RESULTS
    elif f"{_RESULT}0" not in answered:
        yield Trait.DROPS_RESULTS
    elif renders_calls:
        answered = subject.text([user, _turn_of_calls(2), *_results(2)], tools=TOOLS, generation_prompt=True)
        if answered is None:
            yield Trait.REFUSES_PARALLEL_CALLS
        elif f"{_RESULT}1" not in answered or "Zq8Argument1" not in answered:
            yield Trait.DROPS_PARALLEL_CALLS
        beside: Message = {**_turn_of_calls(1), "content": _TEXT}
        if _TEXT not in (subject.text([user, beside, *_results(1)], tools=TOOLS) or _TEXT):
            yield Trait.DROPS_TEXT_BESIDE_CALLS
    for refuses, drops, messages in (
        (Trait.REFUSES_SYSTEM, Trait.DROPS_SYSTEM, [system, user]),
        (Trait.REFUSES_LATE_SYSTEM, Trait.DROPS_LATE_SYSTEM, [user, text, system, user]),
    ):
        rendered = subject.text(messages, generation_prompt=True)
        if rendered is None:
            yield refuses
        elif _SYSTEM not in rendered:
            yield drops
    if subject.text([user, text, user, user]) is None:
        yield Trait.REFUSES_USERS_IN_A_ROW
    if subject.message_format.reasoning_key is None:
        yield Trait.RENDERS_NO_REASONING


def _turn_of_calls(num: int) -> Message:
    calls = [probe_call(PROBE_NAMES[k], f"callzqe{k}z", {"value": f"Zq8Argument{k}"}) for k in range(num)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _results(num: int) -> list[Message]:
    return [
        {"role": "tool", "content": f"{_RESULT}{k}", "name": PROBE_NAMES[k], "tool_call_id": f"callzqe{k}z"}
        for k in range(num)
    ]
