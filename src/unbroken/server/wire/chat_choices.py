"""The choices of chat completions, whole and streamed: content, reasoning and calls of what was sampled.

A whole choice is its stream, joined. A call that cannot be parsed is content, as in vLLM: its text with its delimiters,
on lines of its own. OpenAI has no form for it, so it is also listed in `malformed_tool_calls`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from unbroken.counters import Counters, Event
from unbroken.rendering.base import Delta, ParsedResponse, ParsedToolCall, PartKind, Renderer, ToolCallStatus
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.server.wire.logprobs import format_chat_logprobs
from unbroken.server.wire.openai_fields import format_finish_reason
from unbroken.server.wire.stop_text import StopCutter
from unbroken.server.wire.version_spans import format_weight_versions, list_version_spans
from unbroken.types import FinishReason, SampleChunk, SampledSequence, SampleRequest

_TEXT_KEYS = {PartKind.REASONING: "reasoning_content", PartKind.CONTENT: "content"}


class ChoiceFields(Protocol):
    """The fields of a request that its choices depend on."""

    @property
    def tools(self) -> Any:
        """The tools that were offered."""
        ...

    @property
    def reads_calls(self) -> bool:
        """Whether the reply can have calls; if not, it is plain content."""
        ...

    @property
    def logprobs(self) -> Any:
        """Whether choices have logprobs."""
        ...

    @property
    def return_token_ids(self) -> bool | None:
        """Whether choices have ids."""
        ...

    @property
    def return_tokens_as_token_ids(self) -> bool | None:
        """Whether logprobs name tokens by id."""
        ...

    @property
    def return_weight_versions(self) -> bool | None:
        """Whether choices have `weight_versions`."""
        ...

    def make_cutter(self) -> StopCutter:
        """Make the cutter of one text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceWriter:
    """Formats the choices of one answer."""

    codec: TextCodec
    events: Counters
    model_name: str
    body: ChoiceFields
    renderer: Renderer
    request: SampleRequest
    answer_id: str

    def format_head(self, kind: str) -> dict[str, Any]:
        """The fields before the choices; `kind` is the name of the object."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model_name,
        }

    def format_choice(self, index: int, sequence: SampledSequence) -> dict[str, Any]:
        """Format a whole choice. Call this in the text thread."""
        turn = _Turn(self)
        turn.feed(sequence.completion_ids.tolist())
        turn.close()
        message: dict[str, Any] = {
            "role": "assistant",
            "content": turn.texts[PartKind.CONTENT] or (None if turn.calls else ""),
        }
        if turn.texts[PartKind.REASONING]:
            message["reasoning_content"] = turn.texts[PartKind.REASONING]
        if turn.calls:
            message["tool_calls"] = turn.calls
        return {
            "index": index,
            "message": message,
            "finish_reason": _format_finish_reason(sequence.finish_reason, has_calls=bool(turn.calls)),
            **self.format_ids(sequence),
            **self.format_versions(sequence),
            **turn.format_malformed(),
        }

    def format_ids(self, sampled: SampledSequence | SampleChunk) -> dict[str, Any]:
        """Format ids and logprobs, where the request wants them."""
        body = self.body
        fields: dict[str, Any] = {"logprobs": None}
        if body.logprobs:
            fields["logprobs"] = format_chat_logprobs(self.codec, sampled, as_ids=bool(body.return_tokens_as_token_ids))
        if body.return_token_ids:
            fields["token_ids"] = sampled.completion_ids
        return fields

    def format_versions(self, sampled: SampledSequence | SampleChunk) -> dict[str, Any]:
        """Format the policy versions of a choice, at its end."""
        fields: dict[str, Any] = {"policy_versions": list_version_spans(sampled)}
        if self.body.return_weight_versions:
            fields["weight_versions"] = format_weight_versions(sampled)
        return fields


class ChoiceStream:
    """Formats one streamed choice."""

    def __init__(self, writer: ChoiceWriter, index: int) -> None:
        self._writer = writer
        self._index = index
        self._turn = _Turn(writer)
        self._is_first = True

    def format_event(self, chunk: SampleChunk) -> dict[str, Any]:
        """Format the choice of one event. Text that is not certain yet comes with a later one."""
        ends = chunk.finish_reason is not None
        num_calls = len(self._turn.calls)
        texts = [self._turn.feed(chunk.completion_ids.tolist())]
        if ends:
            texts.append(self._turn.close())
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if self._is_first else {}
        self._is_first = False
        for kind, key in _TEXT_KEYS.items():
            if text := "".join(one[kind] for one in texts):
                delta[key] = text
        if calls := self._turn.calls[num_calls:]:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls, num_calls)]
        choice: dict[str, Any] = {
            "index": self._index,
            "delta": delta,
            "finish_reason": None,
            **self._writer.format_ids(chunk),
        }
        if chunk.finish_reason is not None:
            choice["finish_reason"] = _format_finish_reason(chunk.finish_reason, has_calls=bool(self._turn.calls))
            choice |= self._writer.format_versions(chunk) | self._turn.format_malformed()
        return choice


class _Turn:
    """Reads one completion as texts and calls, whole or in pieces."""

    def __init__(self, writer: ChoiceWriter) -> None:
        self._events = writer.events
        self._reader = writer.renderer.open_response(
            prompt_ids=writer.request.prompt_ids, tools=writer.body.tools or (), reads_calls=writer.body.reads_calls
        )
        self._cutters = {kind: writer.body.make_cutter() for kind in _TEXT_KEYS}
        self._lines = _ContentLines()
        self.texts = dict.fromkeys(_TEXT_KEYS, "")
        """The certain text of each kind."""
        self.calls: list[dict[str, Any]] = []
        """In OpenAI's form."""

    def feed(self, token_ids: Sequence[int]) -> dict[PartKind, str]:
        """Take more ids; returns the text of each kind that is certain now."""
        return self._follow(self._reader.feed(token_ids), ends=False)

    def close(self) -> dict[PartKind, str]:
        """End the completion; returns the text that was held back."""
        return self._follow(self._reader.close(), ends=True)

    def format_malformed(self) -> dict[str, Any]:
        """Count and format the calls that could not be parsed, once the turn is closed."""
        parsed: ParsedResponse = self._reader.finish()
        for call in parsed.failures:
            self._events.count(Event.PARSE_FAILURE, call.status)
        if not parsed.failures:
            return {}
        calls = [{"raw": call.raw, "status": call.status.value, "span": list(call.span)} for call in parsed.failures]
        return {"malformed_tool_calls": calls}

    def _follow(self, deltas: Sequence[Delta], *, ends: bool) -> dict[PartKind, str]:
        new = {kind: "".join(map(self._cutters[kind].feed, texts)) for kind, texts in self._sort(deltas).items()}
        for kind in _TEXT_KEYS:
            new[kind] += self._cutters[kind].finish() if ends else ""
            self.texts[kind] += new[kind]
        return new

    def _sort(self, deltas: Sequence[Delta]) -> dict[PartKind, list[str]]:
        """Sort the texts by kind, and take the calls."""
        texts: dict[PartKind, list[str]] = {kind: [] for kind in _TEXT_KEYS}
        for delta in deltas:
            if delta.tool_call is None:
                is_content = delta.kind is PartKind.CONTENT
                texts[delta.kind].append(self._lines.add_text(delta.text) if is_content else delta.text)
            elif delta.tool_call.status is ToolCallStatus.OK:
                self.calls.append(_format_call(delta.tool_call))
            else:
                texts[PartKind.CONTENT].append(self._lines.add_call(delta.tool_call))
        return texts


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


def _format_call(call: ParsedToolCall) -> dict[str, Any]:
    """Format a call under the model's id, or a new one of nine characters, which the strictest templates require."""
    return {
        "id": call.call_id or uuid4().hex[:9],
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
    }


def _format_finish_reason(reason: FinishReason, *, has_calls: bool) -> str:
    return "tool_calls" if has_calls and reason is FinishReason.STOP else format_finish_reason(reason)
