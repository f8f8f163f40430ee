"""The choices of chat completions, whole and streamed: content, reasoning and calls of what was sampled.

A whole choice is its stream, joined. OpenAI has no form for a call that cannot be parsed: it is content, and listed in
`malformed_tool_calls`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from unbroken.rendering.base import PartKind
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.server.wire.logprobs import format_chat_logprobs
from unbroken.server.wire.openai_fields import format_finish_reason
from unbroken.server.wire.reply import ReplyCall, ReplyReader
from unbroken.server.wire.version_spans import format_weight_versions, list_version_spans
from unbroken.types import FinishReason, SampleChunk, SampledSequence

_TEXT_KEYS = {PartKind.REASONING: "reasoning_content", PartKind.CONTENT: "content"}


class ChoiceFields(Protocol):
    """The fields of a request that its choices depend on."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceWriter:
    """Formats the choices of one answer."""

    codec: TextCodec
    model_name: str
    body: ChoiceFields
    answer_id: str

    def format_head(self, kind: str) -> dict[str, Any]:
        """The fields before the choices; `kind` is the name of the object."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model_name,
        }

    def format_choice(self, index: int, sequence: SampledSequence, reply: ReplyReader) -> dict[str, Any]:
        """Format a whole choice, whose reply is closed. With logprobs, call this in a text thread."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [_format_call(call) for call in reply.calls]
        return {
            "index": index,
            "message": message,
            "finish_reason": _format_finish_reason(sequence.finish_reason, has_calls=bool(reply.calls)),
            **self.format_ids(sequence),
            **self.format_versions(sequence),
            **_format_malformed(reply),
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

    def __init__(self, writer: ChoiceWriter, index: int, reply: ReplyReader) -> None:
        self._writer = writer
        self._index = index
        self._reply = reply
        self._is_first = True

    def format_event(self, chunk: SampleChunk) -> dict[str, Any]:
        """Format the choice of one event. Text that is not certain yet comes with a later one."""
        num_calls = len(self._reply.calls)
        pieces = self._reply.read(chunk)
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if self._is_first else {}
        self._is_first = False
        for kind, key in _TEXT_KEYS.items():
            if text := "".join(piece.text for piece in pieces if piece.kind is kind):
                delta[key] = text
        if calls := self._reply.calls[num_calls:]:
            delta["tool_calls"] = [{"index": k, **_format_call(call)} for k, call in enumerate(calls, num_calls)]
        choice: dict[str, Any] = {
            "index": self._index,
            "delta": delta,
            "finish_reason": None,
            **self._writer.format_ids(chunk),
        }
        if chunk.finish_reason is not None:
            choice["finish_reason"] = _format_finish_reason(chunk.finish_reason, has_calls=bool(self._reply.calls))
            choice |= self._writer.format_versions(chunk) | _format_malformed(self._reply)
        return choice


def _format_call(call: ReplyCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _format_malformed(reply: ReplyReader) -> dict[str, Any]:
    malformed = reply.list_malformed()
    return {"malformed_tool_calls": malformed} if malformed else {}


def _format_finish_reason(reason: FinishReason, *, has_calls: bool) -> str:
    return "tool_calls" if has_calls and reason is FinishReason.STOP else format_finish_reason(reason)
