"""One reply, read as it is sampled, for every dialect: reasoning, content and calls, in their order.

    sampled     <think> hm </think> Let me see. <tool_call> {"name": "add", "arguments": {"a": 1}} </tool_call>
    feed        ReplyPiece(REASONING, "hm")
    feed        ReplyPiece(CONTENT, "Let me "), ReplyPiece(CONTENT, "see.")
    feed        ReplyPiece(TOOL_CALL, call=ReplyCall("3f1c09ab2", "add", '{"a": 1}'))

A whole reply is its pieces, joined. A call that cannot be parsed is content, as in vLLM: its text with its delimiters,
on its own lines; `list_malformed` has what no dialect has a form for.

A stop string is one of the sampled text, delimiters too, as the engine looks for it. The reply is what the model had
said before it: the ids up to there are read as if the model had ended there.

    sampled     <think> hm </think> Let me see.      with the stop string "me s"
    reply       REASONING "hm", CONTENT "Let "       and `parsed` is of everything
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unbroken.counters import Counters, Event
from unbroken.messages import ToolSchema
from unbroken.rendering.base import Delta, ParsedResponse, ParsedToolCall, PartKind, Renderer, ToolCallStatus
from unbroken.rendering.encoding.text_codec import TextCodec, TextStream
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
        codec: TextCodec,
        cutter: StopCutter,
        events: Counters,
        name: str,
    ) -> None:
        """`cutter` has the stop strings; `name` is the completion's own, from which the ids of its calls are made."""
        self._events = events
        self._name = name
        self._reader = renderer.open_response(prompt_ids=prompt_ids, tools=tools, reads_calls=reads_calls)
        """Reads everything."""
        self._cutter = cutter
        self._said = self._reader
        """Reads what comes before a stop string."""
        self._ids: _IdsBeforeStop | None = None
        if cutter.is_active:
            self._said = renderer.open_response(prompt_ids=prompt_ids, tools=tools, reads_calls=reads_calls)
            self._ids = _IdsBeforeStop(codec.open_stream(), cutter)
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
        """All that was sampled, as the renderer parses it; ends the completion."""
        return self._reader.finish()

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the reply."""
        return self._cutter.found

    def read(self, sampled: SampledSequence | SampleChunk) -> list[ReplyPiece]:
        """Take more of what is sampled, and end the completion if this is its end; returns what is certain now."""
        pieces = self.feed(sampled.completion_ids.tolist())
        return pieces if sampled.finish_reason is None else pieces + self.close()

    def feed(self, token_ids: Sequence[int]) -> list[ReplyPiece]:
        """Take more ids; returns what is certain now."""
        if self._ids is None:
            return list(self._follow(self._reader.feed(token_ids)))
        self._reader.feed(token_ids)
        # Nothing is returned once a stop string has begun: the rest is read at the end, when all its ids are here.
        certain = self._ids.feed(token_ids)
        return list(self._follow(self._said.feed(certain)))

    def close(self) -> list[ReplyPiece]:
        """End the completion; returns what was held back."""
        if self._ids is None:
            return list(self._follow(self._reader.close()))
        self._reader.close()
        rest, surplus = self._ids.close()
        deltas = [*self._said.feed(rest), *self._said.close()]
        return list(self._follow(deltas if self.stop_string is None else self._end(deltas, surplus)))

    def _end(self, deltas: Sequence[Delta], surplus: str) -> list[Delta]:
        """The last deltas of a reply that a stop string ended; `surplus` is the text of the last id after its begin."""
        deltas = _cut_end(deltas, surplus)
        last = deltas[-1].tool_call if deltas else None
        if last is None or last.status is ToolCallStatus.OK:
            return deltas
        # A stop string that ends a call, such as `</tool_call>`, or that is in one, does not make it a failed one.
        whole = (each for each in self.parsed.tool_calls if each.span[0] == last.span[0])
        call = next((each for each in whole if each.status is ToolCallStatus.OK), last)
        return [*deltas[:-1], replace(deltas[-1], tool_call=call)]

    def list_malformed(self) -> list[dict[str, Any]]:
        """Count and list the calls that could not be parsed, once the reply is closed; the name of one may be ""."""
        failures = self._reader.finish().failures
        for call in failures:
            self._events.count(Event.PARSE_FAILURE, call.status)
        return [
            {"name": call.name, "raw": call.raw, "status": call.status.value, "span": list(call.span)}
            for call in failures
        ]

    def _follow(self, deltas: Sequence[Delta]) -> Iterator[ReplyPiece]:
        for delta in deltas:
            call = delta.tool_call
            if call is None:
                text = self._lines.add_text(delta.text) if delta.kind is PartKind.CONTENT else delta.text
                yield from self._add_text(delta.kind, text)
            elif call.status is ToolCallStatus.IN_REASONING:
                continue  # its text was returned as reasoning: only `list_malformed` has it
            elif call.status is not ToolCallStatus.OK:
                yield from self._add_text(PartKind.CONTENT, self._lines.add_call(call))
            else:
                self.calls.append(self._make_call(call))
                yield ReplyPiece(kind=PartKind.TOOL_CALL, call=self.calls[-1])

    def _add_text(self, kind: PartKind, text: str) -> Iterator[ReplyPiece]:
        if text:
            self._texts[kind] += text
            yield ReplyPiece(kind=kind, text=text)

    def _make_call(self, call: ParsedToolCall) -> ReplyCall:
        own_id = hashlib.sha256(f"{self._name}/{len(self.calls)}".encode()).hexdigest()[:9]
        return ReplyCall(
            call_id=call.call_id or own_id, name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False)
        )


class _IdsBeforeStop:
    """Passes ids through up to the first stop string in their text; those whose text may begin one are held back.

    With the stop string `END`, the ids of `a`, ` E` and `ND` come out as that of `a`, and at the end as that of ` E`
    with the surplus `E`.
    """

    def __init__(self, stream: TextStream, cutter: StopCutter) -> None:
        self._stream = stream
        self._cutter = cutter
        self._certain = 0
        """Characters before any stop string."""
        self._length = 0
        """Characters so far."""
        self._held: list[tuple[int, str, int]] = []
        """Ids, their texts and where these end. The ids of one character have its text each."""
        self._pending: list[int] = []
        """The ids of a character that is not complete."""

    def feed(self, token_ids: Sequence[int]) -> list[int]:
        """Take more ids; returns those that come before any stop string for certain."""
        for token_id in token_ids:
            if self._cutter.found is not None:
                return []
            self._pending.append(token_id)
            if text := self._stream.feed([token_id]):
                self._add(text)
        ready = [token_id for token_id, _, stop in self._held if stop <= self._certain]
        self._held = self._held[len(ready) :]
        return ready

    def close(self) -> tuple[list[int], str]:
        """The ids that are left before a stop string, and the text of the last one from there on."""
        if self._cutter.found is None:
            self._add(self._stream.finish())
            if self._cutter.found is None:
                return [token_id for token_id, _, _ in self._held], ""
        before = [each for each in self._held if each[2] - len(each[1]) < self._certain]
        surplus = before[-1][1][self._certain - before[-1][2] :] if before and before[-1][2] > self._certain else ""
        return [token_id for token_id, _, _ in before], surplus

    def _add(self, text: str) -> None:
        self._length += len(text)
        self._held += [(token_id, text, self._length) for token_id in self._pending]
        self._pending.clear()
        self._certain += len(self._cutter.feed(text))


def _cut_end(deltas: Sequence[Delta], surplus: str) -> list[Delta]:
    """Cut the surplus from the end of the last text, or what the reader left of it, who trims and reads markup."""
    if not deltas:
        return []
    last = deltas[-1]
    if (call := last.tool_call) is not None:
        return [*deltas[:-1], replace(last, tool_call=replace(call, full_text=_cut_text(call.full_text, surplus)))]
    first = len(deltas) - 1
    while first and deltas[first - 1].tool_call is None and deltas[first - 1].kind is last.kind:
        first -= 1
    text = "".join(delta.text for delta in deltas[first:])
    return [*deltas[:first], replace(last, text=_cut_text(text, surplus))]


def _cut_text(text: str, surplus: str) -> str:
    lengths = (n for n in range(len(surplus), 0, -1) if text.endswith(surplus[:n]) and not surplus[n:].strip())
    return text[: len(text) - next(lengths, 0)]


class _ContentLines:
    """Puts the texts of malformed calls between the content, each on its own lines."""

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
