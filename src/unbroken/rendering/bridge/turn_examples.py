r"""Renders example turns in every combination of reasoning, text and calls that a template accepts.

They show which control tokens stand inside a turn, where sampling must not stop, and which end it:

    Kimi-K3     R<|close|>think<|sep|> .. T<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>
                `- inside ----------------´`- tail ------------------------------------------------------´

A template that writes text and calls of one message as two turns, each with its own header, ends a turn between them:

    Nemotron    T<SPECIAL_12>\n<SPECIAL_11>Assistant\n<TOOLCALL>[..]</TOOLCALL><SPECIAL_12>
                 `- not inside --------------------´
    R1          <｜tool▁calls▁begin｜>..<｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜Assistant｜>T<｜end▁of▁sentence｜>
                                                       `- not inside ------------------´

Reasoning is never a turn of its own: its end stands inside, also where the answer has a second header.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.errors import TemplateError
from unbroken.rendering.encoding.tokenizer import AddedTokens
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.message_format import (
    PROBE_ARGUMENT,
    PROBE_CONTENT,
    PROBE_NAMES,
    PROBE_REASONING,
    PROBE_TOOLS,
    PROBE_USER,
    MessageFormat,
    probe_call,
)

NEXT_TEXT = "Xq7Next"
USER: Mapping[str, Any] = {"role": "user", "content": PROBE_USER}
_MAX_CALLS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnExample:
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


class TurnExamples:
    """Renders the examples of one template."""

    def __init__(self, template: ChatTemplate, message_format: MessageFormat, control: AddedTokens) -> None:
        self._template = template
        self._message_format = message_format
        self._control = control

    def build(self) -> tuple[TurnExample, ...]:
        """Render all turns; those that the template refuses are left out."""
        reasons = (False, True) if self._message_format.reasoning_key is not None else (False,)
        calls = range(_MAX_CALLS + 1) if self._message_format.renders_calls else (0,)
        parts = itertools.product(reasons, (PROBE_CONTENT, "", None), calls)
        prompt = self.render([USER], add_generation_prompt=True)
        turns = (self._render_turn(prompt, *each) for each in parts if each[1] or each[2])
        rendered = [turn for turn in turns if turn is not None]
        before = len(self.render([USER]))
        header = min((turn.text[before : turn.start] for turn in rendered), key=len, default="").strip()
        return tuple(self._build_example(turn, header) for turn in rendered)

    def find_openers(self) -> frozenset[str]:
        """Find the control tokens that a conversation begins with: none of them ends a turn."""
        text = self.render([USER])
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
        message = {**build_turn(reasons=reasons, num_calls=num_calls), "content": content}
        text = self.render([USER, message])
        texts = _find_texts(text, num_calls)
        if texts is None:
            return None
        start = count_shared(text, prompt)
        start = next((m.start for m in self._control.find(text) if m.start < start < m.stop), start)
        is_after_user = start > text.rfind(PROBE_USER) + len(PROBE_USER)
        return _RenderedTurn(
            description=_describe(reasons, bool(content), num_calls),
            message=message,
            text=text,
            start=start if is_after_user else texts.start,
            stop=texts.stop,
        )

    def _build_example(self, turn: _RenderedTurn, header: str) -> TurnExample:
        num_calls = len(turn.message.get("tool_calls", ()))
        inside = self._leave_out_second_header(turn.text[turn.start : turn.stop], header, num_calls)
        return TurnExample(
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
            {"role": "tool", "content": NEXT_TEXT, "tool_call_id": call["id"], "name": call["function"]["name"]}
            for call in calls
        ] or [{"role": "user", "content": NEXT_TEXT}]
        text = self.render([USER, message, *following], add_generation_prompt=True)
        next_text = max(text.find(NEXT_TEXT), 0)
        texts = _find_texts(text[:next_text], len(calls))
        if texts is not None:
            yield text[texts.stop : next_text]


def build_turn(*, reasons: bool = False, has_text: bool = False, num_calls: int = 0) -> dict[str, Any]:
    """Build an assistant message with sentinels as its texts."""
    turn: dict[str, Any] = {"role": "assistant", "content": PROBE_CONTENT if has_text else ""}
    if reasons:
        turn["reasoning_content"] = PROBE_REASONING
    if num_calls:
        turn["tool_calls"] = [
            probe_call(PROBE_NAMES[k], f"callprob{k}", {"value": f"{PROBE_ARGUMENT}{k}"}) for k in range(num_calls)
        ]
    return turn


def count_shared(left: Sequence[str], right: Sequence[str]) -> int:
    """The length of the common beginning."""
    return next((k for k, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


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
