r"""How turns end, how one that was cut is closed (I7), what appending loses, and whether turns are read back.

The completions are what a model would sample: the template's text after its generation prompt.

prompt  <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n
last    <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n
                                                              `body´`- stop -´
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unbroken.audit.conversations import TOOLS, AuditConversation, ConversationMaker, Following, Situation
from unbroken.audit.report import BoundaryFinding, ClosedTurn, RoundTripFinding, TurnEndFinding
from unbroken.audit.subject import Subject
from unbroken.messages import Message, ToolSchema, make_call
from unbroken.rendering.base import Bridge, BridgeOutcome, ParsedResponse, Refusal, ToolCallStatus
from unbroken.rendering.facts import TemplateFacts, TurnEnds
from unbroken.retokenising.changes import align
from unbroken.types import TokenIds, token_ids
from unbroken.types.arrays import count_common_prefix

_NUM_TURNS = 60
"""Turns that are read back."""
_SAID, _NEXT, _CALL_ID = "Zq8Said", "Zq8Next", "callzqe0z"
_HISTORY: tuple[Message, ...] = ({"role": "user", "content": "How far is it?"},)
_FOLLOWING: tuple[Message, ...] = ({"role": "user", "content": "Go on."},)
_CUT = "It is about"
_QUESTION: tuple[Message, ...] = ({"role": "user", "content": "What is known?"},)
_SITUATIONS = (
    Situation(num_calls=0, has_text=True, following=Following.USER),
    Situation(num_calls=1, has_text=False, following=Following.RESULTS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CompletionText:
    """The text of one sampled turn; `stop` is the token that ends it."""

    prompt: str
    body: str
    stop: str


def make_completion(
    subject: Subject, history: Sequence[Message], turn: Message, *, tools: Sequence[ToolSchema], next_role: str = "user"
) -> _CompletionText | None:
    """Make the completion for a turn that a message with the role `next_role` follows.

    None: the template refuses the turn, does not write it after its generation prompt, or nothing ends it.
    """
    ends = subject.facts.turn_ends
    prompt = subject.render_text(history, tools=tools, add_generation_prompt=True)
    last = subject.render_text([*history, turn], tools=tools)
    if prompt is None or last is None or isinstance(ends, Refusal):
        return None
    if prompt == subject.render_text(history, tools=tools):
        last = _drop_generation_prompt(subject.facts, ends, prompt, last)
    body = _find_body(subject.facts, prompt, last)
    if body is None:
        return None
    run = _find_end_run(subject.facts, ends, body)
    if run:
        num_close = count_common_prefix([token for token, _ in run], ends.sequence)
        stop, start = run[max(num_close, 1) - 1]
        return _CompletionText(prompt=prompt, body=body[:start], stop=stop)
    header = _find_header(subject, ends, tools, next_role)
    return None if header is None else _CompletionText(prompt=prompt, body=body.rstrip(), stop=header)


def _drop_generation_prompt(facts: TemplateFacts, ends: TurnEnds, prompt: str, last: str) -> str:
    """Without the generation prompt, for a template that writes it after every conversation."""
    num_shared = count_common_prefix(prompt[::-1], last[::-1])
    start = len(last) - num_shared
    stops = [match.stop for match in facts.control_tokens.find(last, start) if match.token in ends.tokens]
    return last[: stops[-1]] if stops else last


def _find_body(facts: TemplateFacts, prompt: str, last: str) -> str | None:
    """The text after the generation prompt, which may open reasoning that the template leaves out later on."""
    shared = count_common_prefix(prompt, last)
    shared = next((m.start for m in facts.control_tokens.find(prompt) if m.start < shared < m.stop), shared)
    rest = prompt[shared:].strip()
    if not rest:
        return last[shared:]
    opening, closing = facts.reasoning_markup
    body = last[shared:]
    closes = body.lstrip().startswith(closing)
    if rest == opening:  # The model closes the empty reasoning, which the template may have left out.
        return body if closes else f"{closing}{body}"
    if "".join(rest.split()) == opening + closing and closes:
        return body.lstrip().removeprefix(closing)
    return None


def _find_end_run(facts: TemplateFacts, ends: TurnEnds, body: str) -> list[tuple[str, int]]:
    """The end tokens that close the body, with their positions and only white space between them."""
    run: list[tuple[str, int]] = []
    stop = len(body)
    for match in reversed(list(facts.control_tokens.find(body))):
        if match.token not in ends.tokens or body[match.stop : stop].strip():
            break
        run.insert(0, (match.token, match.start))
        stop = match.start
    return run


def _find_header(subject: Subject, ends: TurnEnds, tools: Sequence[ToolSchema], next_role: str) -> str | None:
    """The header of the next message, for templates where it ends a turn."""
    turn: Message = {"role": "assistant", "content": "" if next_role == "tool" else _SAID}
    following: Message = {"role": next_role, "content": _NEXT}
    if next_role == "tool":
        turn["tool_calls"] = [make_call(_CALL_ID, "search", {"query": _SAID})]
        following |= {"tool_call_id": _CALL_ID, "name": "search"}
    messages: list[Message] = [{"role": "user", "content": "hi"}, turn, following]
    text = subject.render_text(messages, tools=tools, add_generation_prompt=True) or ""
    said = text.rfind(_SAID)
    if said < 0:
        return None
    matches = subject.facts.control_tokens.find(text, said)
    return next((match.token for match in matches if match.token in ends.tokens), None)


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
    in_answer, in_reasoning = (f"{closing}{_CUT}", _CUT) if is_opened else (_CUT, f"{opening}\n{_CUT}")
    cut = {"cut by length in its answer": subject.encode(in_answer)}
    if subject.renders_reasoning or is_opened:
        cut["cut by length in its reasoning"] = subject.encode(in_reasoning)
    foreign = subject.tokenizer.eos_token_id
    if foreign is not None and foreign not in ends and not subject.is_stand_in:
        cut[f"ended by {subject.get_tokens([foreign])[0].text}"] = [*subject.encode(_CUT), foreign]
    num_after = len(whole.bridge_ids) if isinstance(whole, Bridge) else 0
    for how, completion in cut.items():
        outcome = _bridge(subject, prompt, completion)
        if isinstance(outcome, Refusal):
            yield ClosedTurn(how=how, closing=outcome.reason.value, given=())
            continue
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


def find_boundaries(subject: Subject, *, max_calls: int) -> tuple[BoundaryFinding, ...]:
    """Compare appending with the bridge at the two usual boundaries."""
    maker = ConversationMaker(seed=1, max_calls=max_calls, with_reasoning=False)
    return tuple(
        _compare(subject, maker.make_conversation(situation, with_history=False))
        for situation in _SITUATIONS
        if situation.num_calls <= max_calls
    )


def _compare(subject: Subject, conversation: AuditConversation) -> BoundaryFinding:
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
    return _compare_ids(subject, situation, outcome.bridge_ids.tolist(), subject.encode(alone))


def _compare_ids(subject: Subject, situation: str, bridge: list[int], appended: list[int]) -> BoundaryFinding:
    """Compare a bridge with the new messages' own rendering, which appending would put in its place."""
    gaps = align(bridge, appended).gaps
    lost = [i for gap in gaps for i in bridge[slice(*gap.before)]]
    added = [i for gap in gaps for i in appended[slice(*gap.after)]]
    return BoundaryFinding(
        situation=situation,
        outcome="different" if gaps else "same",
        lost=subject.get_tokens(lost),
        added=subject.get_tokens(added),
    )


def find_round_trip(subject: Subject, *, seed: int, max_calls: int) -> RoundTripFinding:
    """Parse turns of text and of calls, with and without reasoning."""
    maker = ConversationMaker(seed=seed, max_calls=max_calls, with_reasoning=subject.renders_reasoning)
    differences: Counter[str] = Counter()
    num_same = num_not_comparable = 0
    example = ""
    for k in range(_NUM_TURNS):
        turn = maker.make_turn(min((0, 1, 1, 2)[k % 4], max_calls), with_reasoning=k % 3 == 0)
        sampled = make_completion(
            subject, _QUESTION, turn, tools=TOOLS, next_role="tool" if "tool_calls" in turn else "user"
        )
        if sampled is None:
            num_not_comparable += 1
            continue
        found = _find_differences(turn, sampled, _parse(subject, sampled))
        num_same += not found
        differences.update(found.keys())
        example = example or "; ".join(found.values())
    return RoundTripFinding(
        parser=subject.template_renderer.parser_name,
        num_turns=_NUM_TURNS,
        num_same=num_same,
        num_not_comparable=num_not_comparable,
        differences=dict(sorted(differences.items())),
        example=example,
        unread_calls=subject.template_renderer.unread_calls,
    )


def _parse(subject: Subject, sampled: _CompletionText) -> ParsedResponse:
    return subject.renderer.parse_response(
        token_ids(subject.encode(sampled.body + sampled.stop)),
        prompt_ids=token_ids(subject.encode(sampled.prompt)),
        tools=TOOLS,
    )


def _find_differences(turn: Message, sampled: _CompletionText, parsed: ParsedResponse) -> dict[str, str]:
    """Describe each part that is read differently. The template may trim white space at the ends of texts."""
    found = {}
    content, reasoning = str(turn["content"]).strip(), turn.get("reasoning_content", "").strip()
    if parsed.content.strip() != content:
        found["content"] = f"content {content!r} is read as {parsed.content.strip()!r}"
    if reasoning in sampled.body and parsed.reasoning.strip() != reasoning:
        found["reasoning"] = f"reasoning {reasoning!r} is read as {parsed.reasoning.strip()!r}"
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in turn.get("tool_calls", [])]
    read = [(call.name, call.arguments) for call in parsed.tool_calls if call.status is ToolCallStatus.OK]
    if calls != read:
        written = [f"{call.status.value} {call.raw!r}" for call in parsed.tool_calls] or [f"content {parsed.content!r}"]
        found["calls"] = f"the calls {json.dumps(calls, ensure_ascii=False)} are read as {', '.join(written)}"
    return found
