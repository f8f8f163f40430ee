"""How turns end, and what is given after one that was cut (I7)."""

from __future__ import annotations

from collections.abc import Iterator

from unbroken.audit.report import ClosedTurn, Token, TurnEndFinding
from unbroken.audit.subject import Subject
from unbroken.messages import Message
from unbroken.rendering.base import Bridge, BridgeOutcome, Refusal
from unbroken.rendering.bridge.turn_ends import TurnEnds
from unbroken.rendering.reasoning import find_reasoning_markup
from unbroken.types import TokenIds, token_ids

_HISTORY: tuple[Message, ...] = ({"role": "user", "content": "How far is it?"},)
_FOLLOWING: tuple[Message, ...] = ({"role": "user", "content": "Go on."},)
_CUT = "It is about"


def find_turn_ends(subject: Subject) -> TurnEndFinding:
    """The ends, the stops, and the bridges after turns that did not end by themselves."""
    known = isinstance(subject.ends, TurnEnds)
    texts = sorted(subject.ends.tokens) if isinstance(subject.ends, TurnEnds) else []
    ids = [i for text in texts if (i := subject.control.get_id(text)) is not None]
    return TurnEndFinding(
        ends=_tokens(subject, ids),
        stops=_tokens(subject, subject.renderer.get_stop_token_ids()),
        are_headers=isinstance(subject.ends, TurnEnds) and bool(subject.ends.headers),
        closed=tuple(_closed_turns(subject, ids)) if known else (),
    )


def _closed_turns(subject: Subject, ends: list[int]) -> Iterator[ClosedTurn]:
    prompt = token_ids(subject.encode(subject.text(_HISTORY, generation_prompt=True) or ""))
    whole = _bridge(subject, prompt, [*subject.encode(_CUT), _usual_stop(subject, ends)])
    opening, closing = find_reasoning_markup(subject.template, subject.message_format, subject.control)
    tail = subject.decode(prompt[-12:].tolist())
    is_opened = tail.rfind(opening) > tail.rfind(closing)
    cut = {"cut by length in its answer": subject.encode(f"{closing}{_CUT}" if is_opened else _CUT)}
    if subject.message_format.reasoning_key is not None or is_opened:
        cut["cut by length in its reasoning"] = subject.encode(_CUT if is_opened else f"{opening}\n{_CUT}")
    foreign = subject.tokenizer.eos_token_id
    if foreign is not None and foreign not in ends and not subject.is_stand_in:
        cut[f"ended by {subject.texts([foreign])[0]}"] = [*subject.encode(_CUT), foreign]
    for how, completion in cut.items():
        outcome = _bridge(subject, prompt, completion)
        if isinstance(outcome, Refusal):
            yield ClosedTurn(how=how, closing=outcome.reason.value, given=())
            continue
        num_after = len(whole.bridge_ids) if isinstance(whole, Bridge) else 0
        given = outcome.bridge_ids[: max(len(outcome.bridge_ids) - num_after, 0)]
        yield ClosedTurn(how=how, closing=outcome.closing.value, given=_tokens(subject, given.tolist()))


def _usual_stop(subject: Subject, ends: list[int]) -> int:
    """The end that needs no closing before a user message."""
    slot = subject.text([*_HISTORY, {"role": "assistant", "content": _CUT}, *_FOLLOWING], generation_prompt=True) or ""
    ids = subject.encode(slot[slot.rfind(_CUT) :])
    return next((i for i in ids if i in ends), ends[0])


def _bridge(subject: Subject, prompt: TokenIds, completion: list[int]) -> BridgeOutcome:
    ids = token_ids(completion)
    parsed = subject.renderer.parse_response(ids, prompt_ids=prompt)
    message = parsed.to_message([f"call{k:05d}" for k in range(len(parsed.tool_calls))])
    return subject.renderer.bridge_to_next_turn(prompt, ids, _FOLLOWING, assistant=message, earlier=_HISTORY)


def _tokens(subject: Subject, ids: list[int] | tuple[int, ...]) -> tuple[Token, ...]:
    return tuple(Token(token_id=int(i), text=text) for i, text in zip(ids, subject.texts(ids), strict=True))
