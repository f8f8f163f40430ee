"""Anthropic's Messages, whole and streamed, and the count of a prompt's ids.

A whole message is its stream, joined. Errors are in Anthropic's form (`http/errors.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from fastapi import Request, Response

from unbroken.rendering.base import PartKind
from unbroken.server.context import ServerContext, get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.errors import error_object
from unbroken.server.http.event_stream import open_event_stream
from unbroken.server.http.json import json_response, note_ignored
from unbroken.server.questions import make_question, render_question
from unbroken.server.turns import Question, open_reply, stream_events
from unbroken.server.wire.anthropic import ConversationBody, MessagesBody, read_conversation
from unbroken.server.wire.conversation import make_seal
from unbroken.server.wire.openai import format_finish_reason, list_version_spans
from unbroken.server.wire.reply import ReplyCall, ReplyPiece, ReplyReader, WholeReply
from unbroken.types import FinishReason, SampleChunk, SampledSequence

router = Routes(Access.CLIENT)


@router.post(
    "/v1/messages",
    summary="Anthropic's Messages",
    response_description="a message with `content` blocks, `stop_reason`, `usage`, `policy_versions`; or events",
)
async def _messages(body: MessagesBody, request: Request) -> Response:
    """Render the messages and answer."""
    context = get_context(request)
    asked = await _read_question(context, request, body)
    question = replace(asked, sampling=body.sampling, max_tokens=body.max_tokens, caps_max_tokens=True)
    turn = await context.turns.open(request, question, id_prefix="msg_")
    writer = _MessageWriter(
        answer_id=turn.answer_id,
        model_name=body.model or context.config.model_name,
        prompt_length=len(turn.request.prompt_ids),
        shown=_choose_shown(body),
        max_tokens=body.max_tokens,
        context_length=context.service.engine.context_length,
    )
    if body.stream:
        path = request.url.path
        stream = _MessageStream(writer, open_reply(turn, question, context.codec, context.metrics.events))
        return await open_event_stream(
            stream_events(turn, [stream]),
            format_error=lambda error: error_object(error, path=path),
            is_named=True,
            end=b"",
        )
    (sequence,) = (await turn.sample()).sequences
    return json_response(writer.format_message(await context.read_reply(turn, question, sequence), sequence))


@router.post(
    "/v1/messages/count_tokens", summary="Number of ids of Anthropic's messages", response_description="`input_tokens`"
)
async def _count_tokens(body: ConversationBody, request: Request) -> Response:
    """Render the messages and count the ids of the prompt."""
    context = get_context(request)
    _, prompt = await render_question(context, await _read_question(context, request, body))
    return json_response({"input_tokens": len(prompt.token_ids)})


async def _read_question(context: ServerContext, request: Request, body: ConversationBody) -> Question:
    ignored = body.check_supported()
    conversation = read_conversation(body)
    note_ignored(request, [*ignored, *conversation.ignored])
    return await make_question(context, request, body, conversation, format_name="output_config.format")


def _choose_shown(body: ConversationBody) -> _ShownThinking:
    if body.thinking is None:
        return _ShownThinking.WHOLE
    if body.thinking.type == "disabled":
        return _ShownThinking.NONE
    return _ShownThinking.OMITTED if body.thinking.display == "omitted" else _ShownThinking.WHOLE


Event = dict[str, Any]


class _ShownThinking(StrEnum):
    """How a message shows its reasoning."""

    WHOLE = "whole"
    OMITTED = "omitted"
    """Blocks without text, whose signature has it."""
    NONE = "none"
    """No blocks: the request disabled thinking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessageWriter:
    """Formats one message."""

    answer_id: str
    model_name: str
    prompt_length: int
    shown: _ShownThinking
    max_tokens: int
    """Of the request; the context may allow less."""
    context_length: int

    def format_head(self) -> dict[str, Any]:
        """The message before its content."""
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.format_usage(0),
        }

    def format_message(self, reply: WholeReply, sequence: SampledSequence) -> dict[str, Any]:
        """Format a whole message."""
        blocks = _BlockList(self.shown)
        for piece in reply.pieces:
            list(blocks.add(piece))
        list(blocks.end())
        num_sampled = len(sequence.completion_ids)
        return {
            **self.format_head(),
            "content": blocks.blocks,
            **self.format_end(reply.reader, sequence.finish_reason, num_sampled),
            "usage": self.format_usage(num_sampled),
            **_format_extras(reply.reader, sequence),
        }

    def format_end(self, reply: ReplyReader, reason: FinishReason, num_sampled: int) -> dict[str, Any]:
        """`stop_reason` and `stop_sequence`."""
        if format_finish_reason(reason) == "length":
            is_full = num_sampled < self.max_tokens and self.prompt_length + num_sampled >= self.context_length
            stop_reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif reply.calls:
            stop_reason = "tool_use"
        else:
            stop_reason = "end_turn" if reply.stop_string is None else "stop_sequence"
        return {
            "stop_reason": stop_reason,
            "stop_sequence": reply.stop_string if stop_reason == "stop_sequence" else None,
        }

    def format_usage(self, num_sampled: int) -> dict[str, int]:
        """The counts of ids. What the engine has cached is not known here, and counts as input."""
        return {
            "input_tokens": self.prompt_length,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": num_sampled,
        }


class _MessageStream:
    """Formats the events of one message."""

    def __init__(self, writer: _MessageWriter, reply: ReplyReader) -> None:
        self._writer = writer
        self.reply = reply
        self._blocks = _BlockList(writer.shown)
        self._num_sampled = 0
        self._has_begun = False

    def format_events(self, chunk: SampleChunk) -> Iterator[Event]:
        """Format the events of one chunk. Text that is not certain yet comes with a later one."""
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self._writer.format_head()}
        self._num_sampled += len(chunk.completion_ids)
        for piece in self.reply.read(chunk):
            yield from self._blocks.add(piece)
        if chunk.finish_reason is not None:
            yield from self._blocks.end()
            yield {
                "type": "message_delta",
                "delta": self._writer.format_end(self.reply, chunk.finish_reason, self._num_sampled),
                "usage": self._writer.format_usage(self._num_sampled),
                **_format_extras(self.reply, chunk),
            }
            yield {"type": "message_stop"}


@dataclass(slots=True)
class _BlockList:
    """The content blocks so far. The last one may be open."""

    shown: _ShownThinking
    blocks: list[dict[str, Any]] = field(default_factory=list)
    _open: PartKind | None = None
    _thinking: str = ""
    """The text of the open thinking block, also where it is omitted."""

    def add(self, piece: ReplyPiece) -> Iterator[Event]:
        """Add a piece; yields the events that tell it."""
        if piece.kind is PartKind.REASONING and self.shown is _ShownThinking.NONE:
            return
        if piece.call is not None:
            yield from self.end()
            yield from self._add_call(piece.call)
            return
        if self._open is not piece.kind:
            yield from self.end()
            self._open = piece.kind
            is_text = piece.kind is PartKind.CONTENT
            yield self._start(
                {"type": "text", "text": ""} if is_text else {"type": "thinking", "thinking": "", "signature": ""}
            )
        if piece.kind is PartKind.CONTENT:
            self.blocks[-1]["text"] += piece.text
            yield self._delta({"type": "text_delta", "text": piece.text})
            return
        self._thinking += piece.text
        if self.shown is _ShownThinking.WHOLE:
            self.blocks[-1]["thinking"] += piece.text
            yield self._delta({"type": "thinking_delta", "thinking": piece.text})

    def end(self) -> Iterator[Event]:
        """End the open block."""
        if self._open is None:
            return
        if self._open is PartKind.REASONING:
            seal = make_seal(self._thinking, packed=self.shown is _ShownThinking.OMITTED)
            self.blocks[-1]["signature"], self._thinking = seal, ""
            yield self._delta({"type": "signature_delta", "signature": seal})
        self._open = None
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _add_call(self, call: ReplyCall) -> Iterator[Event]:
        block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
        yield self._start(block)
        self.blocks[-1]["input"] = json.loads(call.arguments)
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _start(self, block: dict[str, Any]) -> Event:
        self.blocks.append(dict(block))
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _format_extras(reply: ReplyReader, sampled: SampledSequence | SampleChunk) -> dict[str, Any]:
    """What Anthropic has no form for."""
    malformed: Sequence[dict[str, Any]] = reply.list_malformed()
    extras: dict[str, Any] = {"policy_versions": list_version_spans(sampled)}
    return {**extras, "malformed_tool_calls": malformed} if malformed else extras
