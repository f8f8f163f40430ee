"""OpenAI's chat completions, and prime-rl's `/v1/chat/completions/tokens`, which continues given ids.

Our renderer renders messages and parses completions. With `tokens`, these ids are the prompt, and the messages are not
rendered, so the template may even refuse them.
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
from unbroken.server.context import ServerContext, get_context
from unbroken.server.http.bodies import Ids, Objects
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.http.event_stream import open_event_stream
from unbroken.server.http.json import OrjsonRoute, json_response
from unbroken.server.images.intake import Prompt
from unbroken.server.wire.image_features import format_features
from unbroken.server.wire.logprobs import format_chat_logprobs
from unbroken.server.wire.openai_fields import (
    OpenAIFields,
    choose_max_tokens,
    count_usage,
    format_finish_reason,
    format_usage,
)
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
    """"auto", or "none" to offer no tools. Calls cannot be forced."""
    max_completion_tokens: int | None = None
    """Used instead of `max_tokens`. Without both, all that fits."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    """How many of the most likely ids to report at each position."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the image processor for all images, such as `max_pixels`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template, such as `enable_thinking`."""

    def check_supported(self) -> None:
        """Raise `HttpError` or `SamplingError` for what this server does not support."""
        super().check_supported()
        if self.tool_choice not in (None, "auto", "none"):
            raise HttpError(
                400, f"tool_choice must be 'auto' or 'none', got {shorten(self.tool_choice)}", param="tool_choice"
            )

    @property
    def offered_tools(self) -> Any:
        """The tools to render."""
        return () if self.tool_choice == "none" else self.tools or ()


class ChatTokensBody(ChatBody):
    """A `ChatBody` with the prompt's ids."""

    tokens: Ids
    """The prompt; `messages` are not rendered."""


@router.post(
    "/v1/chat/completions",
    summary="OpenAI's chat completions",
    response_description="`choices` with `message`, `logprobs`, `finish_reason`, `policy_versions`; or events",
)
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Render the messages and answer."""
    context = get_context(request)
    adapter = context.find_adapter(body.model)
    body.check_supported()
    renderer, prompt = await _render(context, body)
    return await _answer(context, body, renderer, prompt, adapter)


@router.post(
    "/v1/chat/completions/render",
    summary="Messages to ids and images (vLLM)",
    response_description="`token_ids`, expanded, and the `features` that `/inference/v1/generate` takes",
)
async def render_chat(body: ChatBody, request: Request) -> Response:
    """Render the messages without sampling. `features` name images by hash, under which the server keeps them."""
    context = get_context(request)
    context.find_adapter(body.model)
    _, prompt = await _render(context, body)
    return json_response(
        {
            "model": context.config.model_name,
            "token_ids": prompt.token_ids,
            "features": format_features(prompt.images),
        }
    )


@router.post(
    "/v1/chat/completions/tokens",
    summary="Chat completions over given ids",
    response_description="as for /v1/chat/completions",
)
async def chat_completions_tokens(body: ChatTokensBody, request: Request) -> Response:
    """Continue exactly `tokens`. The images in the messages belong to the placeholders in `tokens`, in order."""
    context = get_context(request)
    adapter = context.find_adapter(body.model)
    body.check_supported()
    settings = context.images.encode_settings(body.mm_processor_kwargs)
    messages = await context.images.load_messages(body.messages, settings)
    images = [get_image_source(part) for _, part in find_image_parts(messages)]
    tokens = token_ids(body.tokens, name="tokens")
    (prompt,) = await context.images.place([tokens], [images], settings, names=lambda _: "images of messages")
    renderer = await context.run_in_text_thread(lambda: context.get_renderer(body.chat_template_kwargs))
    return await _answer(context, body, renderer, prompt, adapter)


async def _render(context: ServerContext, body: ChatBody) -> tuple[Renderer, Prompt]:
    settings = context.images.encode_settings(body.mm_processor_kwargs)
    messages: Any = await context.images.load_messages(body.messages, settings)
    tools = body.offered_tools

    def render() -> tuple[Renderer, Prompt]:
        renderer = context.get_renderer(body.chat_template_kwargs, settings)
        rendered = renderer.render(messages, tools=tools)
        return renderer, Prompt(token_ids=rendered.token_ids, images=rendered.images)

    return await context.run_in_text_thread(render)


async def _answer(
    context: ServerContext, body: ChatBody, renderer: Renderer, prompt: Prompt, adapter: str | None
) -> Response:
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.to_params(
        end_ids=renderer.get_stop_token_ids(),
        max_tokens=choose_max_tokens(
            len(prompt.token_ids), wanted=wanted, context_length=context.service.engine.context_length
        ),
        num_top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
        structured_output=body.structured_output,
    )
    (request,) = context.service.make_requests([prompt], params, n=body.num_choices, adapter=adapter)
    writer = _ChoiceWriter(context=context, body=body, renderer=renderer, request=request)
    if body.stream:
        return await open_event_stream(_stream(writer))
    (result,) = await context.service.sample([request])
    choices = await context.run_in_text_thread(
        lambda: [writer.format_choice(k, sequence) for k, sequence in enumerate(result.sequences)]
    )
    answer = {**writer.format_head("chat.completion"), "choices": choices, "usage": count_usage([result])}
    if body.return_token_ids:
        answer["prompt_token_ids"] = result.prompt_ids
    if result.image_sha256s:
        answer["image_sha256s"] = result.image_sha256s
    return json_response(answer)


async def _stream(writer: _ChoiceWriter) -> AsyncGenerator[dict[str, Any]]:
    """Yield one event per chunk; text that is not certain yet comes with a later event."""
    body, request = writer.body, writer.request
    head = writer.format_head("chat.completion.chunk")
    streams = [_ChoiceStream(writer=writer, index=index) for index in range(request.n)]
    num_sampled = 0
    prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids} if body.return_token_ids else {}
    async with aclosing(writer.context.service.stream([request])) as chunks:
        async for _, chunk in chunks:
            num_sampled += len(chunk.completion_ids)
            stream = streams[chunk.index]
            yield {**head, **prompt, "choices": [stream.format_event(chunk)]}
            prompt = {}
    if body.includes_usage:
        yield {**head, "choices": [], "usage": format_usage(len(request.prompt_ids), num_sampled)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChoiceWriter:
    """Formats the choices of one answer."""

    context: ServerContext
    body: ChatBody
    renderer: Renderer
    request: SampleRequest
    answer_id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")

    def format_head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.context.config.model_name,
        }

    def format_choice(self, index: int, sequence: SampledSequence) -> dict[str, Any]:
        """Call this in the text thread."""
        parsed = self.renderer.parse_response(
            sequence.completion_ids, prompt_ids=self.request.prompt_ids, tools=self.body.offered_tools
        )
        calls = [_format_call(call) for call in parsed.tool_calls if call.status is ToolCallStatus.OK]
        content = self.body.make_cutter().cut(parsed.content or "")
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if parsed.reasoning:
            message["reasoning_content"] = self.body.make_cutter().cut(parsed.reasoning)
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "finish_reason": _format_finish_reason(sequence.finish_reason, has_calls=bool(calls)),
            **self.format_ids(sequence),
            "policy_versions": list_version_spans(sequence),
            **self.format_malformed(parsed),
        }

    def format_ids(self, sampled: SampledSequence | SampleChunk) -> dict[str, Any]:
        body = self.body
        fields: dict[str, Any] = {"logprobs": None}
        if body.logprobs:
            fields["logprobs"] = format_chat_logprobs(
                self.context.codec, sampled, as_ids=bool(body.return_tokens_as_token_ids)
            )
        if body.return_token_ids:
            fields["token_ids"] = sampled.completion_ids
        return fields

    def format_malformed(self, parsed: ParsedResponse) -> dict[str, Any]:
        """Count and format the calls that could not be parsed, for which OpenAI has no form."""
        for call in parsed.failures:
            self.context.metrics.events.count(Event.PARSE_FAILURE, call.status)
        if not parsed.failures:
            return {}
        calls = [{"raw": call.raw, "status": call.status.value, "span": list(call.span)} for call in parsed.failures]
        return {"malformed_tool_calls": calls}


class _ChoiceStream:
    """Formats one streamed choice."""

    def __init__(self, *, writer: _ChoiceWriter, index: int) -> None:
        self._writer = writer
        self._index = index
        self._reader = writer.renderer.open_response(
            prompt_ids=writer.request.prompt_ids, tools=writer.body.offered_tools
        )
        self._cutters: dict[PartKind, StopCutter] = {kind: writer.body.make_cutter() for kind in _TEXT_KEYS}
        self._num_calls = 0
        self._is_first = True

    def format_event(self, chunk: SampleChunk) -> dict[str, Any]:
        deltas = self._reader.feed(chunk.completion_ids.tolist())
        choice: dict[str, Any] = {"index": self._index, "finish_reason": None, **self._writer.format_ids(chunk)}
        if chunk.finish_reason is not None:
            deltas = (*deltas, *self._reader.close())
            choice["policy_versions"] = list_version_spans(chunk)
            choice |= self._writer.format_malformed(self._reader.finish())
        choice["delta"] = self._format_delta(deltas, is_last=chunk.finish_reason is not None)
        if chunk.finish_reason is not None:
            choice["finish_reason"] = _format_finish_reason(chunk.finish_reason, has_calls=self._num_calls > 0)
        return choice

    def _format_delta(self, deltas: tuple[Delta, ...], *, is_last: bool) -> dict[str, Any]:
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
                {"index": self._num_calls + number, **_format_call(call)} for number, call in enumerate(good)
            ]
            self._num_calls += len(good)
        return delta


def _format_call(call: ParsedToolCall) -> dict[str, Any]:
    """Format a call under the model's id, or a new one of nine characters, which the strictest templates require."""
    return {
        "id": call.call_id or uuid4().hex[:9],
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
    }


def _format_finish_reason(reason: FinishReason, *, has_calls: bool) -> str:
    return "tool_calls" if has_calls and reason is FinishReason.STOP else format_finish_reason(reason)
