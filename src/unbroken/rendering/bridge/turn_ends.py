r"""Finds how a template ends an assistant turn, by probing it, and proves where sampling may stop.

Worked through for five templates (A is the turn's text, the next message follows `/`):

                last turn          turn in mid-conversation
    ChatML      A<|im_end|>        A<|im_end|>\n / <|im_start|>user    sequence (<|im_end|>,), stop <|im_end|>
    two tokens  A<|e1|><|e2|>      A<|e1|><|e2|> / <|user|>            sequence (<|e1|>, <|e2|>), stop <|e2|>
    gpt-oss     A<|return|>        A<|end|> / <|start|>user            sequence (), last_turn_ends {<|return|>: <|end|>}
    GLM         A                  A / <|user|>, A / <|observation|>   the next header ends the turn
    Kimi-K3     A<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>          stop <|end_of_msg|>

A stop may not also stand inside a turn of reasoning, text and calls, as Kimi-K3's `<|close|>` does after the reasoning:
sampling would end there. Stops are found for each kind of turn. A kind that ends only with a token that also stands
inside turns, as Solar's text ends like its reasoning, has none: the tokenizer or the caller must name one.

Examples of turns show which control tokens stand inside a turn, and which end it:

    Kimi-K3     R<|close|>think<|sep|> .. T<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>
                `- inside ----------------´`- tail ------------------------------------------------------´

A template that writes text and calls of one message as two turns, each with its own header, ends a turn between them:

    Nemotron    T<SPECIAL_12>\n<SPECIAL_11>Assistant\n<TOOLCALL>[..]</TOOLCALL><SPECIAL_12>
                 `- not inside --------------------´
    R1          <｜tool▁calls▁begin｜>..<｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜Assistant｜>T<｜end▁of▁sentence｜>
                                                       `- not inside ------------------´

Reasoning is never a separate turn: its end stands inside, also where the answer has a second header.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unbroken.errors import TemplateError
from unbroken.messages import make_call
from unbroken.rendering.base import Refusal, RefusalReason
from unbroken.rendering.chat_template import ChatTemplate
from unbroken.rendering.encoding.tokenizer import AddedTokens
from unbroken.rendering.message_format import (
    PROBE_ARGUMENT,
    PROBE_CONTENT,
    PROBE_NAMES,
    PROBE_REASONING,
    PROBE_TOOLS,
    PROBE_USER,
    MessageFormat,
)
from unbroken.types.arrays import count_common_prefix


class BridgeRefusedError(Exception):
    """There is no bridge here. Callers of this package get its `refusal`."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.refusal = Refusal(reason=reason, detail=detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnds:
    """The control tokens that end an assistant turn."""

    tokens: frozenset[str]
    """All of them; the first one after a turn's text begins the end of the turn."""
    stops: frozenset[str]
    """Those that the model samples last, for `SamplingParams.stop_token_ids`: none of them stands inside a turn."""
    without_stop: tuple[str, ...] = ()
    """The kinds of turns that end with none of the stops, such as "text": the tokenizer or the caller must name one."""
    inside: frozenset[str] = frozenset()
    """The control tokens that stand inside turns, before their end."""
    ambiguous: frozenset[str] = frozenset()
    """The ends that begin a longer end and stand inside a turn as well: a turn that was cut there has not ended."""
    endings: frozenset[str] = frozenset()
    """The texts from the first of the tokens to the stop, with all that the template writes between them."""
    sequence: tuple[str, ...]
    """Those of one turn, in order. The sampled stop token may be any of them."""
    last_turn_ends: Mapping[str, str]
    """The end of a conversation's last turn -> the end that replaces it in mid-conversation."""
    headers: frozenset[str]
    """Those that are headers of the next message; empty if turns have their own ends."""


class TurnEndProbe:
    """Finds the turn ends of one template by rendering probes."""

    def __init__(self, template: ChatTemplate, message_format: MessageFormat, control: AddedTokens) -> None:
        self._control = control
        self._turns = _TurnExamples(template, message_format, control)
        self._examples = self._turns.build()
        self._openers = self._turns.find_openers()
        self.tokens_inside = frozenset(token for example in self._examples for token in example.inside)
        """The control tokens that stand inside turns, before their end."""

    def find_turn_ends(self) -> TurnEnds:
        """Find the tokens that end a turn.

        Raises `BridgeRefusedError` if no control token is between an assistant turn and a user message, or other text
        is before it.
        """
        between = {role: self._find_text_before_next(role) for role in ("user", "tool", "system")}
        next_tokens = {role: self._list_first_tokens(text) for role, text in between.items()}
        if not next_tokens["user"]:
            raise self._refuse_end(between["user"])
        first = next_tokens["user"][0]
        last = self._find_last_turn_end()
        headers = frozenset(tokens[0] for tokens in next_tokens.values() if tokens)
        call_end = self._find_end_of_calls()
        if self._opens_user_message(first) and (not last or len(headers) > 1):
            headers |= call_end
            return self._prove(TurnEnds(tokens=headers, stops=headers, sequence=(), last_turn_ends={}, headers=headers))
        sequence = tuple(last[: count_common_prefix(last, next_tokens["user"])])
        return self._prove(
            TurnEnds(
                tokens=frozenset({first, *last, *call_end}),
                stops=frozenset(({*sequence[-1:], *last[-1:]} or {first}) | call_end),
                sequence=sequence,
                last_turn_ends={} if sequence else dict.fromkeys(last, first),
                headers=frozenset(),
            )
        )

    def find_generation_prompt(self) -> str:
        """The text that opens an assistant turn; empty if the template does not write one on its own."""
        without, with_prompt = self._turns.render([_USER]), self._turns.render([_USER], add_generation_prompt=True)
        return with_prompt[len(without) :] if with_prompt.startswith(without) else ""

    def _refuse_end(self, between: str) -> BridgeRefusedError:
        """The error for a turn whose end, `between` it and a user message, begins with no control token."""
        found = next(self._control.find(between), None)
        what = "no control token" if found is None else repr(between[: found.stop].strip())
        return BridgeRefusedError(
            RefusalReason.UNDERIVABLE,
            f"{what} between an assistant turn and a user message after it: a turn must end with a control token "
            "and no other text before that",
        )

    def _prove(self, found: TurnEnds) -> TurnEnds:
        """Keep the stops that stand only at the end of a turn, and find one for each example that is left without."""
        # A header of the next message may be what conversations begin with; an end of a turn is not.
        openers: frozenset[str] = frozenset() if found.headers else self._openers
        impossible = self.tokens_inside | openers
        stops = set(found.stops - impossible)
        without_stop, whole_ends = [], set()
        for example in self._examples:
            at_end, *before_next = [[match.token for match in self._control.find(tail)] for tail in example.tails]
            after = list(itertools.chain(*before_next))
            written = at_end or after
            if len(at_end) == 1:
                whole_ends.add(at_end[0])
            if not written or not stops.isdisjoint([*written, *after]):
                continue
            possible = next((token for token in written if token not in impossible), None)
            if possible is None:
                without_stop.append(example.description)
            else:
                stops.add(possible)
        tokens = (found.tokens - openers) | stops
        return replace(
            found,
            tokens=tokens,
            stops=frozenset(stops),
            without_stop=tuple(dict.fromkeys(without_stop)),
            inside=self.tokens_inside,
            ambiguous=(tokens & self.tokens_inside) - set(found.last_turn_ends.values()) - whole_ends,
            endings=frozenset(self._find_endings(tokens, stops)),
        )

    def _find_endings(self, tokens: Collection[str], stops: Collection[str]) -> Iterator[str]:
        for tail in (tail for example in self._examples for tail in example.tails):
            matches = list(self._control.find(tail))
            stop = next((match.stop for match in matches if match.token in stops), None)
            start = next((match.start for match in matches if match.token in tokens), None)
            if start is not None and stop is not None:
                yield tail[start:stop]

    def _find_last_turn_end(self) -> list[str]:
        """The control tokens after the text of a conversation's last turn, with only white space between them.

        Some templates write a generation prompt after it, though none was asked for.
        """
        text = _get_text_after(self._turns.render([_USER, _build_turn(has_text=True)]), PROBE_CONTENT)
        found: list[str] = []
        position = 0
        for match in self._control.find(text):
            if (found and text[position : match.start].strip()) or match.token in self._openers:
                break
            found.append(match.token)
            position = match.stop
        return found

    def _find_text_before_next(self, role: str) -> str:
        """The text between a turn's text and the text of a next message with this role; empty if one is left out."""
        following: dict[str, Any] = {"role": role, "content": _NEXT_TEXT}
        if role == "tool":
            following |= {"tool_call_id": "callprob1", "name": PROBE_NAMES[0]}
        messages = [_USER, _build_turn(has_text=True), following]
        text = _get_text_after(self._turns.render(messages, add_generation_prompt=True), PROBE_CONTENT)
        return text[: max(text.find(_NEXT_TEXT), 0)]

    def _list_first_tokens(self, text: str) -> list[str]:
        """The control tokens of a text; none if it begins with other text, as the header `user: <|img|>` does."""
        found = list(self._control.find(text))
        return [match.token for match in found] if found and not text[: found[0].start].strip() else []

    def _opens_user_message(self, token: str) -> bool:
        text = self._turns.render([_USER])
        position = text.rfind(PROBE_USER)
        before = {match.token for match in self._control.find(text, 0, max(position, 0))}
        after = {match.token for match in self._control.find(text, max(position, 0))}
        return token in before - after

    def _find_end_of_calls(self) -> set[str]:
        """The last control token of a turn that makes a call, unless it only ends each single call."""
        text = _get_text_after(self._turns.render([_USER, _build_turn(num_calls=1)]), f"{PROBE_ARGUMENT}0")
        text = text[: next((match.start for match in self._control.find(text) if match.token in self._openers), None)]
        matches = list(self._control.find(text))
        if not matches or text[matches[-1].stop :].strip():
            return set()
        end = matches[-1].token
        two_calls = _get_text_after(self._turns.render([_USER, _build_turn(num_calls=2)]), f"{PROBE_ARGUMENT}0")
        between, found, _ = two_calls.partition(f"{PROBE_ARGUMENT}1")
        return set() if found and end in between else {end}


def _get_text_after(text: str, sentinel: str) -> str:
    position = text.rfind(sentinel)
    return text[position + len(sentinel) :] if position >= 0 else ""


_NEXT_TEXT = "Xq7Next"
_USER: Mapping[str, Any] = {"role": "user", "content": PROBE_USER}
_MAX_CALLS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _TurnExample:
    """One turn as the template renders it."""

    description: str
    """Its parts, such as "reasoning, text and 2 calls"."""
    inside: frozenset[str]
    """The control tokens between the generation prompt and the turn's last text."""
    tails: tuple[str, ...]
    """The text after the turn's last text: in the last turn of a conversation, and up to a next message's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RenderedTurn:
    """A turn after a user message: `text[start:stop]` are the characters up to the end of its last text."""

    description: str
    message: Mapping[str, Any]
    text: str
    start: int
    stop: int


class _TurnExamples:
    """Renders example turns in every combination of reasoning, text and calls that one template accepts."""

    def __init__(self, template: ChatTemplate, message_format: MessageFormat, control: AddedTokens) -> None:
        self._template = template
        self._message_format = message_format
        self._control = control

    def build(self) -> tuple[_TurnExample, ...]:
        """Render all turns; those that the template refuses are left out."""
        reasons = (False, True) if self._message_format.reasoning_key is not None else (False,)
        calls = range(_MAX_CALLS + 1) if self._message_format.renders_calls else (0,)
        parts = itertools.product(reasons, (PROBE_CONTENT, "", None), calls)
        prompt = self.render([_USER], add_generation_prompt=True)
        turns = (self._render_turn(prompt, *each) for each in parts if each[1] or each[2])
        rendered = [turn for turn in turns if turn is not None]
        before = len(self.render([_USER]))
        header = min((turn.text[before : turn.start] for turn in rendered), key=len, default="").strip()
        return tuple(self._build_example(turn, header) for turn in rendered)

    def find_openers(self) -> frozenset[str]:
        """Find the control tokens that a conversation begins with: none of them ends a turn."""
        text = self.render([_USER])
        found: set[str] = set()
        position = 0
        for match in self._control.find(text):
            if text[position : match.start].strip():
                break
            found.add(match.token)
            position = match.stop
        return frozenset(found)

    def render(self, messages: Sequence[Any], *, add_generation_prompt: bool = False) -> str:
        """Render a probe; empty if the template refuses it. Content that is None stays None: some templates need it."""
        converted = [
            {**new, "content": None} if given["content"] is None else new
            for given, new in zip(messages, self._message_format.convert(messages), strict=True)
        ]
        try:
            return self._template.render(converted, tools=PROBE_TOOLS, add_generation_prompt=add_generation_prompt)
        except TemplateError:
            return ""

    def _render_turn(self, prompt: str, reasons: bool, content: str | None, num_calls: int) -> _RenderedTurn | None:
        message = {**_build_turn(reasons=reasons, num_calls=num_calls), "content": content}
        text = self.render([_USER, message])
        texts = _find_texts(text, num_calls)
        if texts is None:
            return None
        start = count_common_prefix(text, prompt)
        start = next((m.start for m in self._control.find(text) if m.start < start < m.stop), start)
        is_after_user = start > text.rfind(PROBE_USER) + len(PROBE_USER)
        return _RenderedTurn(
            description=_describe(reasons, bool(content), num_calls),
            message=message,
            text=text,
            start=start if is_after_user else texts.start,
            stop=texts.stop,
        )

    def _build_example(self, turn: _RenderedTurn, header: str) -> _TurnExample:
        num_calls = len(turn.message.get("tool_calls", ()))
        inside = self._leave_out_second_header(turn.text[turn.start : turn.stop], header, num_calls)
        return _TurnExample(
            description=turn.description,
            inside=frozenset(match.token for match in self._control.find(inside)),
            tails=(turn.text[turn.stop :], *self._find_tails_before_next(turn.message)),
        )

    def _leave_out_second_header(self, turn: str, header: str, num_calls: int) -> str:
        """Leave out the end of a turn and the header of a second one after text or calls, if both are in `turn`."""
        texts = (PROBE_CONTENT, f"{PROBE_ARGUMENT}{num_calls - 1}")
        after = min((at + len(each) for each in texts if (at := turn.find(each)) >= 0), default=len(turn))
        second = turn.find(header, after) if header else -1
        ends = list(self._control.find(turn, after, max(second, 0)))
        if not ends or turn[ends[-1].stop : second].strip():
            return turn
        return turn[: ends[-1].start] + turn[second + len(header) :]

    def _find_tails_before_next(self, message: Mapping[str, Any]) -> Iterator[str]:
        calls = message.get("tool_calls", ())
        following: list[dict[str, Any]] = [
            {"role": "tool", "content": _NEXT_TEXT, "tool_call_id": call["id"], "name": call["function"]["name"]}
            for call in calls
        ] or [{"role": "user", "content": _NEXT_TEXT}]
        text = self.render([_USER, message, *following], add_generation_prompt=True)
        next_text = max(text.find(_NEXT_TEXT), 0)
        texts = _find_texts(text[:next_text], len(calls))
        if texts is not None:
            yield text[texts.stop : next_text]


def _build_turn(*, reasons: bool = False, has_text: bool = False, num_calls: int = 0) -> dict[str, Any]:
    """Build an assistant message with sentinels as its texts."""
    turn: dict[str, Any] = {"role": "assistant", "content": PROBE_CONTENT if has_text else ""}
    if reasons:
        turn["reasoning_content"] = PROBE_REASONING
    if num_calls:
        turn["tool_calls"] = [
            make_call(f"callprob{k}", PROBE_NAMES[k], {"value": f"{PROBE_ARGUMENT}{k}"}) for k in range(num_calls)
        ]
    return turn


def _find_texts(text: str, num_calls: int) -> slice | None:
    """The characters from the turn's first text to the end of its last one; None if it renders none of them."""
    after_user = text.rfind(PROBE_USER)
    sentinels = (PROBE_REASONING, PROBE_CONTENT, *(f"{PROBE_ARGUMENT}{k}" for k in range(num_calls)))
    found = [(at, at + len(each)) for each in sentinels if (at := text.find(each, after_user + 1)) >= 0]
    if after_user < 0 or not found:
        return None
    return slice(min(start for start, _ in found), max(stop for _, stop in found))


def _describe(reasons: bool, has_text: bool, num_calls: int) -> str:
    calls = ("", "a call", f"{num_calls} calls")[min(num_calls, 2)]
    return " and ".join(part for part in ("reasoning" * reasons, "text" * has_text, calls) if part)
