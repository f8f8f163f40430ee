"""Gemini's generateContent, whole and streamed, and the count of a prompt's ids.

A whole answer is its stream, joined. Errors are in Google's form (`http/errors.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from fastapi import Request, Response

from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.server.context import ServerContext, get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.errors import HttpError, error_object, shorten
from unbroken.server.http.event_stream import open_event_stream
from unbroken.server.http.json import json_response, note_ignored
from unbroken.server.questions import make_question, render_question
from unbroken.server.turns import OpenTurn, Question, open_reply, stream_events
from unbroken.server.wire.gemini import ContentsBody, CountBody, make_signature, read_conversation
from unbroken.server.wire.openai import format_finish_reason, list_version_spans
from unbroken.server.wire.reply import ReplyPiece, ReplyReader
from unbroken.types import SampleChunk, SampledSequence

router = Routes(Access.CLIENT)
Version: TypeAlias = Literal["v1", "v1alpha", "v1beta"]
"""Of Google's API: its SDKs differ in the one that they ask for, and all are answered alike."""


@router.post(
    "/{version}/models/{model:path}:generateContent",
    summary="Gemini's generateContent",
    response_description="`candidates` with one content of `parts`, `usageMetadata`, `policy_versions`",
)
async def _generate_content(version: Version, model: str, body: ContentsBody, request: Request) -> Response:
    """Render the contents and answer."""
    context = get_context(request)
    body = body.at_path(model)
    question, turn = await _open_turn(context, request, body)
    writer = _make_writer(body, turn)
    (sequence,) = (await turn.sample()).sequences
    reply = await context.read_reply(turn, question, sequence)
    parts = [part for piece in reply.pieces for part in writer.format_parts(piece)] + writer.end_parts()
    num_sampled = len(sequence.completion_ids)
    return json_response(writer.format_answer(_join_parts(parts), reply.reader, sequence, num_sampled))


@router.post(
    "/{version}/models/{model:path}:streamGenerateContent",
    summary="Gemini's streamGenerateContent",
    response_description="events, each an answer with the parts that are new",
)
async def _stream_generate_content(
    version: Version, model: str, body: ContentsBody, request: Request, alt: str | None = None
) -> Response:
    """Render the contents and answer with server-sent events."""
    if alt != "sse":
        raise HttpError(
            400,
            f"alt must be 'sse' (?alt=sse), got {shorten(alt)}: this server streams events, not an array",
            param="alt",
        )
    context, path = get_context(request), request.url.path
    body = body.at_path(model)
    question, turn = await _open_turn(context, request, body)
    stream = _AnswerStream(_make_writer(body, turn), open_reply(turn, question, context.codec, context.metrics.events))
    return await open_event_stream(
        stream_events(turn, [stream]), format_error=lambda error: error_object(error, path=path), end=b""
    )


@router.post(
    "/{version}/models/{model:path}:countTokens",
    summary="Number of ids of Gemini's contents",
    response_description="`totalTokens`",
)
async def _count_tokens(version: Version, model: str, body: CountBody, request: Request) -> Response:
    """Render the contents and count the ids of the prompt."""
    context = get_context(request)
    question = await _read_question(context, request, body.choose().at_path(model))
    _, prompt = await render_question(context, question)
    return json_response({"totalTokens": len(prompt.token_ids)})


async def _read_question(context: ServerContext, request: Request, body: ContentsBody) -> Question:
    ignored = body.check_supported()
    conversation = read_conversation(body)
    note_ignored(request, [*ignored, *conversation.ignored])
    name = "generationConfig.responseMimeType"
    return await make_question(context, request, body, conversation, format_name=name)


async def _open_turn(context: ServerContext, request: Request, body: ContentsBody) -> tuple[Question, OpenTurn]:
    asked = await _read_question(context, request, body)
    question = replace(asked, sampling=body.sampling, max_tokens=body.config.max_output_tokens, caps_max_tokens=True)
    return question, await context.turns.open(request, question, id_prefix="gen_")


def _make_writer(body: ContentsBody, turn: OpenTurn) -> _AnswerWriter:
    return _AnswerWriter(
        answer_id=turn.answer_id,
        model_name=body.model or "",
        prompt_length=len(turn.request.prompt_ids),
        shows_thoughts=body.thinking.include_thoughts is True,
    )


Part = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class _AnswerWriter:
    """Formats one answer."""

    answer_id: str
    model_name: str
    prompt_length: int
    shows_thoughts: bool
    """Whether there are parts of reasoning. Its signature comes with the part after it in any case."""
    _thoughts: str = field(default="", init=False)
    """Reasoning whose signature is not written yet."""

    def format_parts(self, piece: ReplyPiece) -> Iterator[Part]:
        """The parts that tell a piece."""
        if piece.kind is PartKind.REASONING:
            self._thoughts += piece.text
            if self.shows_thoughts:
                yield {"text": piece.text, "thought": True}
        elif piece.call is not None:
            call = {"id": piece.call.call_id, "name": piece.call.name, "args": json.loads(piece.call.arguments)}
            yield {"functionCall": call, **self._sign()}
        else:
            yield {"text": piece.text, **self._sign()}

    def end_parts(self) -> list[Part]:
        """The signature of reasoning that nothing follows."""
        return [{"text": "", "thought": True, **self._sign()}] if self._thoughts else []

    def format_answer(
        self, parts: Sequence[Part], reply: ReplyReader, sampled: SampledSequence | SampleChunk, num_sampled: int
    ) -> dict[str, Any]:
        """An answer with these parts: a whole one, or an event of a stream."""
        # SDKs take a content without parts for no answer, and forget its question too.
        candidate: dict[str, Any] = {
            "content": {"role": "model", "parts": list(parts) or [{"text": ""}]},
            "index": 0,
        }
        answer: dict[str, Any] = {
            "candidates": [candidate],
            "usageMetadata": {
                "promptTokenCount": self.prompt_length,
                "candidatesTokenCount": num_sampled,
                "totalTokenCount": self.prompt_length + num_sampled,
            },
            "modelVersion": self.model_name,
            "responseId": self.answer_id,
        }
        if sampled.finish_reason is None:
            return answer
        malformed = reply.list_malformed()
        candidate |= _format_end(reply, malformed, is_cut=format_finish_reason(sampled.finish_reason) == "length")
        answer["policy_versions"] = list_version_spans(sampled)
        return {**answer, "malformed_tool_calls": malformed} if malformed else answer

    def _sign(self) -> dict[str, str]:
        thoughts, self._thoughts = self._thoughts, ""
        return {"thoughtSignature": make_signature(thoughts)} if thoughts else {}


class _AnswerStream:
    """Formats the events of one answer."""

    def __init__(self, writer: _AnswerWriter, reply: ReplyReader) -> None:
        self._writer = writer
        self.reply = reply
        self._num_sampled = 0

    def format_events(self, chunk: SampleChunk) -> Iterator[dict[str, Any]]:
        """Format the event of one chunk, if it has news. Text that is not certain yet comes with a later one."""
        self._num_sampled += len(chunk.completion_ids)
        parts = [part for piece in self.reply.read(chunk) for part in self._writer.format_parts(piece)]
        if chunk.finish_reason is not None:
            parts += self._writer.end_parts()
        if parts or chunk.finish_reason is not None:
            yield self._writer.format_answer(parts, self.reply, chunk, self._num_sampled)


def _join_parts(parts: Sequence[Part]) -> list[Part]:
    """Join texts of one kind that follow one another; a signature begins a new part."""
    joined: list[Part] = []
    for part in parts:
        before = joined[-1] if joined else {}
        is_same = "text" in before and "text" in part and before.get("thought") == part.get("thought")
        if is_same and "thoughtSignature" not in part:
            before["text"] += part["text"]
        else:
            joined.append(dict(part))
    return joined


def _format_end(reply: ReplyReader, malformed: Sequence[dict[str, Any]], *, is_cut: bool) -> dict[str, str]:
    """`finishReason`, and what is wrong with a call where there is nothing but calls that cannot be read."""
    tried = [call["raw"] for call in malformed if call["status"] != ToolCallStatus.IN_REASONING.value]
    if is_cut:
        return {"finishReason": "MAX_TOKENS"}
    if tried and not reply.calls:
        return {"finishReason": "MALFORMED_FUNCTION_CALL", "finishMessage": f"Malformed function call: {tried[0]}"}
    return {"finishReason": "STOP"}
