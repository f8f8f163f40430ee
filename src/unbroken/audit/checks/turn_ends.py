"""How turns end, and how a turn that was cut is closed (I7)."""

from __future__ import annotations

from collections.abc import Iterator

from unbroken.audit.report import ClosedTurn, TurnEndFinding
from unbroken.audit.subject import Subject
from unbroken.messages import Message
from unbroken.rendering.base import Bridge, BridgeOutcome, Refusal
from unbroken.types import TokenIds, token_ids

_HISTORY: tuple[Message, ...] = ({"role": "user", "content": "How far is it?"},)
_FOLLOWING: tuple[Message, ...] = ({"role": "user", "content": "Go on."},)
_CUT = "It is about"


def find_turn_ends(subject: Subject) -> TurnEndFinding:
    """Find the ends, the stop ids, and the bridges after turns that did not end by themselves."""
    stops = subject.get_tokens(subject.renderer.get_stop_token_ids())
    ends, control = subject.facts.turn_ends, subject.facts.control_tokens
    if isinstance(ends, Refusal):
        return TurnEndFinding(ends=(), stops=stops, are_headers=False, closed=(), stops_inside=())
    ids = [i for text in sorted(ends.tokens) if (i := control.get_id(text)) is not None]
    return TurnEndFinding(
        ends=subject.get_tokens(ids),
        stops=stops,
        are_headers=bool(ends.headers),
        closed=tuple(_close_cut_turns(subject, ids)),
        stops_inside=tuple(stop for stop in stops if stop.text in ends.inside),
    )


def _close_cut_turns(subject: Subject, ends: list[int]) -> Iterator[ClosedTurn]:
    prompt = token_ids(subject.encode(subject.render_text(_HISTORY, add_generation_prompt=True) or ""))
    whole = _bridge(subject, prompt, [*subject.encode(_CUT), _find_usual_stop(subject, ends)])
    opening, closing = subject.facts.reasoning_markup
    tail = subject.decode(prompt[-12:].tolist())
    is_opened = tail.rfind(opening) > tail.rfind(closing)
    cut = {"cut by length in its answer": subject.encode(f"{closing}{_CUT}" if is_opened else _CUT)}
    if subject.renders_reasoning or is_opened:
        cut["cut by length in its reasoning"] = subject.encode(_CUT if is_opened else f"{opening}\n{_CUT}")
    foreign = subject.tokenizer.eos_token_id
    if foreign is not None and foreign not in ends and not subject.is_stand_in:
        cut[f"ended by {subject.get_tokens([foreign])[0].text}"] = [*subject.encode(_CUT), foreign]
    for how, completion in cut.items():
        outcome = _bridge(subject, prompt, completion)
        if isinstance(outcome, Refusal):
            yield ClosedTurn(how=how, closing=outcome.reason.value, given=())
            continue
        num_after = len(whole.bridge_ids) if isinstance(whole, Bridge) else 0
        given = outcome.bridge_ids[: max(len(outcome.bridge_ids) - num_after, 0)]
        yield ClosedTurn(how=how, closing=outcome.closing.value, given=subject.get_tokens(given.tolist()))


def _find_usual_stop(subject: Subject, ends: list[int]) -> int:
    """The end that the template writes before a user message."""
    messages: list[Message] = [*_HISTORY, {"role": "assistant", "content": _CUT}, *_FOLLOWING]
    text = subject.render_text(messages, add_generation_prompt=True) or ""
    ids = subject.encode(text[text.rfind(_CUT) :])
    return next((i for i in ids if i in ends), ends[0])


def _bridge(subject: Subject, prompt: TokenIds, completion: list[int]) -> BridgeOutcome:
    ids = token_ids(completion)
    parsed = subject.renderer.parse_response(ids, prompt_ids=prompt)
    message = parsed.to_message([f"call{k:05d}" for k in range(len(parsed.tool_calls))])
    return subject.renderer.bridge_to_next_turn(prompt, ids, _FOLLOWING, assistant=message, earlier=_HISTORY)
