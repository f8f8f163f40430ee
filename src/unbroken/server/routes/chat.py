"""OpenAI's chat completions, and the same over given ids: `/v1/chat/completions/tokens`, which prime-rl introduced.

Messages are rendered, and completions parsed, by our renderer in both. Where `tokens` are given they are the prompt, id
for id: the messages only inform the parsing, and are not rendered, even where the template would refuse them.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from pydantic import Field

from unbroken.counters import Event
from unbroken.images.loading import find_image_parts
from unbroken.messages import get_image_source
from unbroken.rendering.base import Delta, ParsedResponse, ParsedToolCall, PartKind, Renderer, ToolCallStatus
from unbroken.server.context import ServerContext, context_of
from unbroken.server.http.bodies import Ids, Objects
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.http.event_stream import event_stream
from unbroken.server.http.json import OrjsonRoute, json_response
from unbroken.server.images.intake import Prompt
from unbroken.server.wire.image_features import features_object
from unbroken.server.wire.logprobs import chat_logprobs
from unbroken.server.wire.openai_fields import OpenAIFields, room_for, usage_object, usage_of_results
from unbroken.server.wire.openai_fields import finish_reason as plain_finish_reason
from unbroken.server.wire.stop_text import StopCutter
from unbroken.server.wire.version_spans import list_version_spans
from unbroken.types import FinishReason, SampleChunk, SampledSequence, SampleRequest, token_ids

router = APIRouter(route_class=OrjsonRoute)
_TEXT_KEYS = {PartKind.REASONING: "reasoning_content", PartKind.CONTENT: "content"}


class ChatBody(OpenAIFields):
    """A conversation to answer."""

    messages: Objects
    tools: Objects | None = None
    """Functions as JSON schemas."""
    tool_choice: Any = None
    """"auto", or "none", which offers no tools: nothing forces a call."""
    max_completion_tokens: int | None = None
    """Before `max_tokens`; without either, all that fits."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    """How many of the most likely ids to report at each position."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """What the image processor is told, such as `max_pixels`; for every image."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Options of the template, such as `enable_thinking`."""

    def check_followed(self) -> None:
        """Raise for what this server cannot follow."""
        super().check_followed()
        if self.tool_choice not in (None, "auto", "none"):
            raise HttpError(
                400, f"tool_choice must be 'auto' or 'none', got {shorten(self.tool_choice)}", param="tool_choice"
            )

    @property
    def offered_tools(self) -> Any:
        """The tools that are rendered."""
        return () if self.tool_choice == "none" else self.tools or ()


class ChatTokensBody(ChatBody):
    """The same, with the prompt's ids."""

    tokens: Ids
    """The prompt; `messages` are not rendered."""


@router.post(
    "/v1/chat/completions",
    summary="OpenAI's chat completions",
    response_description="`choices` with `message`, `logprobs`, `finish_reason`, `policy_versions`; or events",
)
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Render the messages and answer."""
    context = context_of(request)
    adapter = context.adapter_of(body.model)
    body.check_followed()
    renderer, prompt = await _render(context, body)
    return await _answer(context, body, renderer, prompt, adapter)


@router.post(
    "/v1/chat/completions/render",
    summary="Messages to ids and images (vLLM)",
    response_description="`token_ids`, expanded, and the `features` that `/inference/v1/generate` takes",
)
async def render_chat(body: ChatBody, request: Request) -> Response:
    """Render the messages and sample nothing. In `features` an image is its hash, which the server knows it by."""
    context = context_of(request)
    context.adapter_of(body.model)
    _, prompt = await _render(context, body)
    return json_response(
        {
            "model": context.config.model_name,
            "token_ids": prompt.token_ids,
            "features": features_object(prompt.images),
        }
    )


@router.post(
    "/v1/chat/completions/tokens",
    summary="Chat completions over given ids",
    response_description="the same as of /v1/chat/completions",
)
async def chat_completions_tokens(body: ChatTokensBody, request: Request) -> Response:
    """Continue exactly `tokens`; the images of the messages belong to the placeholders in them, in order."""
    context = context_of(request)
    adapter = context.adapter_of(body.model)
    body.check_followed()
    settings = context.images.settings(body.mm_processor_kwargs)
    messages = await context.images.load_messages(body.messages, settings)
    images = [get_image_source(part) for _, part in find_image_parts(messages)]
    tokens = token_ids(body.tokens, name="tokens")
    (prompt,) = await context.images.place([tokens], [images], settings, names=lambda _: "images of messages")
    renderer = await context.text(lambda: context.renderer(body.chat_template_kwargs))
    return await _answer(context, body, renderer, prompt, adapter)


async def _render(context: ServerContext, body: ChatBody) -> tuple[Renderer, Prompt]:
    settings = context.images.settings(body.mm_processor_kwargs)
    messages: Any = await context.images.load_messages(body.messages, settings)
    tools = body.offered_tools

    def render() -> tuple[Renderer, Prompt]:
        renderer = context.renderer(body.chat_template_kwargs, settings)
        rendered = renderer.render(messages, tools=tools)
        return renderer, Prompt(token_ids=rendered.token_ids, images=rendered.images)

    return await context.text(render)


async def _answer(
    context: ServerContext, body: ChatBody, renderer: Renderer, prompt: Prompt, adapter: str | None
) -> Response:
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.params(
        end_ids=renderer.get_stop_token_ids(),
        max_tokens=room_for(len(prompt.token_ids), wanted=wanted, context_length=context.service.engine.context_length),
        num_top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
        form=body.form,
    )
    (request,) = context.service.make_requests([prompt], params, n=body.num_choices, adapter=adapter)
    writer = _ChoiceWriter(context=context, body=body, renderer=renderer, request=request)
    if body.stream:
        return await event_stream(_stream(writer))
    (result,) = await context.service.sample([request])
    choices = await context.text(lambda: [writer.choice(k, sequence) for k, sequence in enumerate(result.sequences)])
    answer = {**writer.head("chat.completion"), "choices": choices, "usage": usage_of_results([result])}
    if body.return_token_ids:
        answer["prompt_token_ids"] = result.prompt_ids
    if result.image_sha256s:
        answer["image_sha256s"] = result.image_sha256s
    return json_response(answer)


async def _stream(writer: _ChoiceWriter) -> AsyncGenerator[dict[str, Any]]:
    """One event for each chunk; text that is not certain yet comes with a later one."""
    body, request = writer.body, writer.request
    head = writer.head("chat.completion.chunk")
    streams = [_ChoiceStream(writer=writer, index=index) for index in range(request.n)]
    num_sampled = 0
    prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids} if body.return_token_ids else {}
    async with aclosing(writer.context.service.stream([request])) as chunks:
        async for _, chunk in chunks:
            num_sampled += len(chunk.completion_ids)
            stream = streams[chunk.index]
            yield {**head, **prompt, "choices": [stream.event(chunk)]}
            prompt = {}
    if body.includes_usage:
        yield {**head, "choices": [], "usage": usage_object(len(request.prompt_ids), num_sampled)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChoiceWriter:
    """Writes the choices of one answer."""

    context: ServerContext
    body: ChatBody
    renderer: Renderer
    request: SampleRequest
    answer_id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")

    def head(self, kind: str) -> dict[str, Any]:
        """What every answer and event begins with."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.context.config.model_name,
        }

    def choice(self, index: int, sequence: SampledSequence) -> dict[str, Any]:
        """A whole choice; runs in the text thread."""
        parsed = self.renderer.parse_response(
            sequence.completion_ids, prompt_ids=self.request.prompt_ids, tools=self.body.offered_tools
        )
        calls = [call_object(call) for call in parsed.tool_calls if call.status is ToolCallStatus.OK]
        content = self.body.cutter().cut(parsed.content or "")
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if parsed.reasoning:
            message["reasoning_content"] = self.body.cutter().cut(parsed.reasoning)
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "finish_reason": finish_reason(sequence.finish_reason, has_calls=bool(calls)),
            **self.facts(sequence),
            "policy_versions": list_version_spans(sequence),
            **self.malformed(parsed),
        }

    def facts(self, sampled: SampledSequence | SampleChunk) -> dict[str, Any]:
        """Logprobs and ids, as far as they were asked for."""
        body = self.body
        facts: dict[str, Any] = {"logprobs": None}
        if body.logprobs:
            facts["logprobs"] = chat_logprobs(self.context.codec, sampled, as_ids=bool(body.return_tokens_as_token_ids))
        if body.return_token_ids:
            facts["token_ids"] = sampled.completion_ids
        return facts

    def malformed(self, parsed: ParsedResponse) -> dict[str, Any]:
        """Attempts at calls that are none, counted; nothing where there are none. OpenAI has no form for them."""
        for call in parsed.failures:
            self.context.metrics.events.count(Event.PARSE_FAILURE, call.status)
        if not parsed.failures:
            return {}
        calls = [{"raw": call.raw, "status": call.status.value, "span": list(call.span)} for call in parsed.failures]
        return {"malformed_tool_calls": calls}


class _ChoiceStream:
    """One choice of a stream."""

    def __init__(self, *, writer: _ChoiceWriter, index: int) -> None:
        self._writer = writer
        self._index = index
        self._reader = writer.renderer.open_response(
            prompt_ids=writer.request.prompt_ids, tools=writer.body.offered_tools
        )
        self._cutters: dict[PartKind, StopCutter] = {kind: writer.body.cutter() for kind in _TEXT_KEYS}
        self._num_calls = 0
        self._is_first = True

    def event(self, chunk: SampleChunk) -> dict[str, Any]:
        """The choice of one event."""
        deltas = self._reader.feed(chunk.completion_ids.tolist())
        choice: dict[str, Any] = {"index": self._index, "finish_reason": None, **self._writer.facts(chunk)}
        if chunk.finish_reason is not None:
            deltas = (*deltas, *self._reader.close())
            choice["policy_versions"] = list_version_spans(chunk)
            choice |= self._writer.malformed(self._reader.finish())
        choice["delta"] = self._delta(deltas, is_last=chunk.finish_reason is not None)
        if chunk.finish_reason is not None:
            choice["finish_reason"] = finish_reason(chunk.finish_reason, has_calls=self._num_calls > 0)
        return choice

    def _delta(self, deltas: tuple[Delta, ...], *, is_last: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if self._is_first else {}
        self._is_first = False
        for kind, key in _TEXT_KEYS.items():
            cutter = self._cutters[kind]
            text = cutter.feed("".join(one.text for one in deltas if one.kind is kind))
            if text := text + (cutter.finish() if is_last else ""):
                delta[key] = text
        calls = [one.tool_call for one in deltas if one.tool_call is not None]
        good = [call for call in calls if call.status is ToolCallStatus.OK]
        if good:
            delta["tool_calls"] = [
                {"index": self._num_calls + number, **call_object(call)} for number, call in enumerate(good)
            ]
            self._num_calls += len(good)
        return delta


def call_object(call: ParsedToolCall) -> dict[str, Any]:
    """A call on the wire, under the model's own id, or a new one of nine characters as the strictest templates ask."""
    return {
        "id": call.call_id or uuid4().hex[:9],
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
    }


def finish_reason(reason: FinishReason, *, has_calls: bool) -> str:
    """One of OpenAI's words."""
    return "tool_calls" if has_calls and reason is FinishReason.STOP else plain_finish_reason(reason)
