"""One reply, read as it is sampled, for every dialect: reasoning, content and calls, in their order.

    sampled     <think> hm </think> Let me see. <tool_call> {"name": "add", "arguments": {"a": 1}} </tool_call>
    feed        ReplyPiece(REASONING, "hm")
    feed        ReplyPiece(CONTENT, "Let me "), ReplyPiece(CONTENT, "see.")
    feed        ReplyPiece(TOOL_CALL, call=ReplyCall("3f1c09ab2", "add", '{"a": 1}'))

A whole reply is its pieces, joined. A call that cannot be parsed is content, as in vLLM: its text with its delimiters,
on lines of its own; `list_malformed` has what no dialect has a form for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.counters import Counters, Event
from unbroken.messages import ToolSchema
from unbroken.rendering.base import Delta, ParsedResponse, ParsedToolCall, PartKind, Renderer, ToolCallStatus
from unbroken.server.wire.openai import StopCutter
from unbroken.types import SampleChunk, SampledSequence, TokenIds

_TEXT_KINDS = (PartKind.REASONING, PartKind.CONTENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyCall:
    """One call of a tool."""

    call_id: str
    """The model's own, or one of nine characters, which the strictest templates require."""
    name: str
    arguments: str
    """A JSON object as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPiece:
    """Text of one kind that is certain now, or a whole call."""

    kind: PartKind
    """REASONING, CONTENT or TOOL_CALL."""
    text: str = ""
    call: ReplyCall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeReply:
    """A reply that was read to its end."""

    reader: ReplyReader
    pieces: Sequence[ReplyPiece]
    """All of it, in order."""


class ReplyReader:
    """Reads one completion, whole or in pieces. What it has read so far is in `reasoning`, `content` and `calls`."""

    def __init__(
        self,
        *,
        renderer: Renderer,
        prompt_ids: TokenIds,
        tools: Sequence[ToolSchema],
        reads_calls: bool,
        make_cutter: Callable[[], StopCutter],
        events: Counters,
        name: str,
    ) -> None:
        """`name` is the completion's own, from which the ids of its calls are made."""
        self._events = events
        self._name = name
        self._reader = renderer.open_response(prompt_ids=prompt_ids, tools=tools, reads_calls=reads_calls)
        self._cutters = {kind: make_cutter() for kind in _TEXT_KINDS}
        self._texts = dict.fromkeys(_TEXT_KINDS, "")
        self._lines = _ContentLines()
        self.calls: list[ReplyCall] = []

    @property
    def reasoning(self) -> str:
        """The reasoning that is certain."""
        return self._texts[PartKind.REASONING]

    @property
    def content(self) -> str:
        """The content that is certain."""
        return self._texts[PartKind.CONTENT]

    @property
    def parsed(self) -> ParsedResponse:
        """The whole reply as the renderer parses it; ends the completion."""
        return self._reader.finish()

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended a text."""
        return next((cutter.found for cutter in self._cutters.values() if cutter.found is not None), None)

    def read(self, sampled: SampledSequence | SampleChunk) -> list[ReplyPiece]:
        """Take more of what is sampled, and end the completion if this is its end; returns what is certain now."""
        pieces = self.feed(sampled.completion_ids.tolist())
        return pieces if sampled.finish_reason is None else pieces + self.close()

    def feed(self, token_ids: Sequence[int]) -> list[ReplyPiece]:
        """Take more ids; returns what is certain now."""
        return list(self._follow(self._reader.feed(token_ids)))

    def close(self) -> list[ReplyPiece]:
        """End the completion; returns what was held back."""
        return [*self._follow(self._reader.close()), *self._release(_TEXT_KINDS)]

    def list_malformed(self) -> list[dict[str, Any]]:
        """Count and list the calls that could not be parsed, once the reply is closed."""
        failures = self._reader.finish().failures
        for call in failures:
            self._events.count(Event.PARSE_FAILURE, call.status)
        return [{"raw": call.raw, "status": call.status.value, "span": list(call.span)} for call in failures]

    def _follow(self, deltas: Sequence[Delta]) -> Iterator[ReplyPiece]:
        for delta in deltas:
            call = delta.tool_call
            if call is None:
                text = self._lines.add_text(delta.text) if delta.kind is PartKind.CONTENT else delta.text
                yield from self._cut(delta.kind, text)
            elif call.status is ToolCallStatus.IN_REASONING:
                continue  # its text was returned as reasoning: only `list_malformed` has it
            elif call.status is not ToolCallStatus.OK:
                yield from self._cut(PartKind.CONTENT, self._lines.add_call(call))
            else:
                yield from self._release(_TEXT_KINDS)
                self.calls.append(self._make_call(call))
                yield ReplyPiece(kind=PartKind.TOOL_CALL, call=self.calls[-1])

    def _cut(self, kind: PartKind, text: str) -> Iterator[ReplyPiece]:
        """Add text up to a stop string. What the other kind held back comes first: the order is the model's."""
        if text:
            yield from self._release([other for other in _TEXT_KINDS if other is not kind])
            yield from self._add_text(kind, self._cutters[kind].feed(text))

    def _release(self, kinds: Iterable[PartKind]) -> Iterator[ReplyPiece]:
        """Add what was held back for a stop string: one that spans two kinds would have ended the reply."""
        for kind in kinds:
            yield from self._add_text(kind, self._cutters[kind].finish())

    def _add_text(self, kind: PartKind, text: str) -> Iterator[ReplyPiece]:
        if text:
            self._texts[kind] += text
            yield ReplyPiece(kind=kind, text=text)

    def _make_call(self, call: ParsedToolCall) -> ReplyCall:
        own_id = hashlib.sha256(f"{self._name}/{len(self.calls)}".encode()).hexdigest()[:9]
        return ReplyCall(
            call_id=call.call_id or own_id, name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False)
        )


class _ContentLines:
    """Puts the texts of malformed calls between the content, each on lines of its own."""

    def __init__(self) -> None:
        self._last = ""
        self._needs_line = False
        self._span: tuple[int, int] | None = None

    def add_text(self, text: str) -> str:
        """Take content; returns it with what separates it from a call before it."""
        return self._add(text, self._needs_line)

    def add_call(self, call: ParsedToolCall) -> str:
        """Take a malformed call; returns its text. Attempts that share a text have it once."""
        if call.span == self._span:
            return ""
        self._span = call.span
        added = self._add(call.full_text, bool(self._last))
        self._needs_line = True
        return added

    def _add(self, text: str, needs_line: bool) -> str:
        if not text:
            return ""
        separator = "\n" if needs_line and not self._last.endswith("\n") and not text.startswith("\n") else ""
        self._last, self._needs_line = text[-1], False
        return separator + text
