"""The class of a template: what it does to the history, and which parts of a conversation it cannot carry."""

from __future__ import annotations

from collections.abc import Iterator

from unbroken.audit.conversations import TOOL_NAMES, TOOLS, make_call
from unbroken.audit.report import LIMITS, PARALLEL_LIMITS, FuzzFinding, KindFinding, TemplateKind, Trait
from unbroken.audit.subject import Subject
from unbroken.errors import TemplateError
from unbroken.messages import Message
from unbroken.rendering.base import HistoryEffect, Refusal

_SYSTEM, _USER, _TEXT, _RESULT = "Zq8System", "Zq8User", "Zq8Text", "Zq8Result"


def find_traits(subject: Subject) -> tuple[Trait, ...]:
    """Find the parts of a conversation that the template does not carry, by rendering some test messages."""
    return tuple(_check_traits(subject))


def find_kind(subject: Subject, traits: tuple[Trait, ...], fuzz: FuzzFinding) -> KindFinding:
    """Find the class from the effects on the history (P2) that the bridges of all conversations saw."""
    ends = subject.facts.turn_ends
    after_user, after_results = (fuzz.history.get(follows, {}) for follows in ("user", "tool"))
    if isinstance(ends, Refusal) or not {**after_user, **after_results}:
        details = [ends.detail] if isinstance(ends, Refusal) else [share.detail for share in fuzz.refused]
        detail = _find_error(subject) or next(iter(details), "")
        return KindFinding(kind=TemplateKind.UNDERIVABLE, traits=traits, detail=detail)
    kind = TemplateKind.APPEND_ONLY
    if HistoryEffect.DROPS_REASONING in after_user:
        kind = TemplateKind.STRIPS_REASONING_ON_USER
    if HistoryEffect.DROPS_REASONING in after_results:
        kind = TemplateKind.STRIPS_REASONING
    if HistoryEffect.REWRITTEN in after_user or HistoryEffect.REWRITTEN in after_results:
        kind = TemplateKind.REWRITES_HISTORY
    return KindFinding(kind=kind, traits=traits)


def find_max_calls(traits: tuple[Trait, ...]) -> int:
    """The number of calls in one turn that the template carries; 3 stands for any number."""
    if (LIMITS - PARALLEL_LIMITS) & set(traits):
        return 0
    return 1 if PARALLEL_LIMITS & set(traits) else 3


def _find_error(subject: Subject) -> str:
    """What is wrong with the template's rendering of one short question; empty if it renders it."""
    question: Message = {"role": "user", "content": _USER}
    try:
        text = subject.template_renderer.render_text([question], add_generation_prompt=True)
    except TemplateError as error:
        return str(error)
    return "" if _USER in text else "the template leaves out the text of a question"


def _check_traits(subject: Subject) -> Iterator[Trait]:
    user: Message = {"role": "user", "content": _USER}
    system: Message = {"role": "system", "content": _SYSTEM}
    text: Message = {"role": "assistant", "content": _TEXT}
    renders_calls = subject.facts.message_format.renders_calls
    if (subject.render_text([user], tools=TOOLS) or "") == (subject.render_text([user]) or ""):
        yield Trait.IGNORES_TOOLS
    if not renders_calls:
        yield Trait.RENDERS_NO_CALLS
    calls = [_make_turn_of_calls(1), *_make_results(1)] if renders_calls else [text, *_make_results(1)]
    answered = subject.render_text([user, *calls], tools=TOOLS, add_generation_prompt=True)
    if answered is None:
        yield Trait.REFUSES_RESULTS
    elif f"{_RESULT}0" not in answered:
        yield Trait.DROPS_RESULTS
    elif renders_calls:
        answered = subject.render_text(
            [user, _make_turn_of_calls(2), *_make_results(2)], tools=TOOLS, add_generation_prompt=True
        )
        if answered is None:
            yield Trait.REFUSES_PARALLEL_CALLS
        elif f"{_RESULT}1" not in answered or "Zq8Argument1" not in answered:
            yield Trait.DROPS_PARALLEL_CALLS
        beside: Message = {**_make_turn_of_calls(1), "content": _TEXT}
        if _TEXT not in (subject.render_text([user, beside, *_make_results(1)], tools=TOOLS) or _TEXT):
            yield Trait.DROPS_TEXT_BESIDE_CALLS
    for refuses, drops, messages in (
        (Trait.REFUSES_SYSTEM, Trait.DROPS_SYSTEM, [system, user]),
        (Trait.REFUSES_LATE_SYSTEM, Trait.DROPS_LATE_SYSTEM, [user, text, system, user]),
    ):
        rendered = subject.render_text(messages, add_generation_prompt=True)
        if rendered is None:
            yield refuses
        elif _SYSTEM not in rendered:
            yield drops
    if subject.render_text([user, text, user, user]) is None:
        yield Trait.REFUSES_USERS_IN_A_ROW
    if not subject.renders_reasoning:
        yield Trait.RENDERS_NO_REASONING


def _make_turn_of_calls(num: int) -> Message:
    calls = [make_call(TOOL_NAMES[k], f"callzqe{k}z", {"value": f"Zq8Argument{k}"}) for k in range(num)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _make_results(num: int) -> list[Message]:
    return [
        {"role": "tool", "content": f"{_RESULT}{k}", "name": TOOL_NAMES[k], "tool_call_id": f"callzqe{k}z"}
        for k in range(num)
    ]
