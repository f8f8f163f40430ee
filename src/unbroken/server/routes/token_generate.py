"""vLLM's token dialect, `POST /inference/v1/generate` (vLLM 0.32): one prompt as ids, answered with ids.

Unsupported sampling parameters are refused by name, unless they are null or vLLM's default. The ids that end a turn
stop a completion, as vLLM's end-of-text ids do, unless `ignore_eos`.
"""

from __future__ import annotations

import time
from asyncio import wrap_future
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal
from uuid import uuid4

from fastapi import Request, Response
from pydantic import ConfigDict, Field

from unbroken.errors import ImageError
from unbroken.server.context import ServerContext, get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.bodies import BodyModel, Ids, Objects
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.http.event_stream import Events, open_event_stream
from unbroken.server.http.json import json_response, note_ignored
from unbroken.server.images import RequestPrompt
from unbroken.server.turns import get_session_id
from unbroken.server.wire.fields import GENERATE, GENERATE_SAMPLING
from unbroken.server.wire.images import FeaturesBody, format_placeholders, place_features
from unbroken.server.wire.openai import (
    SamplingFields,
    StopCutter,
    StreamOptions,
    choose_max_tokens,
    count_usage,
    format_chat_logprobs,
    format_finish_reason,
    format_token_logprobs,
    format_usage,
    format_weight_versions,
)
from unbroken.types import FinishReason, SampleChunk, SampledSequence, SampleRequest, token_ids, write_experts

router = Routes(Access.CLIENT)


class TokenSampling(SamplingFields):
    """vLLM's `SamplingParams`."""

    model_config = ConfigDict(extra="allow")

    n: int | None = None
    max_tokens: int | None = None
    """By default all that fits."""
    logprobs: int | None = Field(default=None, ge=0)
    """How many of the most likely ids to report at each position; null for no logprobs."""
    return_routed_experts: bool | None = None
    """Add the experts of each id to the choices, `routed_experts`, in the form of vLLM (which has no such parameter:
    there the server's option decides)."""
    return_kept_ids: bool | None = None
    """Add the ids that each id was sampled from to the choices, `sampling_mask`, in the form of vLLM, where top-k,
    top-p or min-p cut any; an empty list is the whole vocabulary. (In vLLM the server's option decides.)"""
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    """For `output_mode` "text"; true by default."""


class TokenGenerateBody(BodyModel):
    """One prompt to continue."""

    model_config = ConfigDict(extra="allow")

    token_ids: Ids
    sampling_params: TokenSampling
    features: FeaturesBody | None = None
    """Images by hash, from `/v1/chat/completions/render`."""
    content_parts: Objects | None = None
    """Images in the order of their placeholders: `{"type": "image_url", "url": ...}`, data URL or `sha256:...`."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the image processor for all images, such as `max_pixels`."""
    model: str | None = None
    request_id: str | None = None
    """Returned in the answer; new by default."""
    session_id: str | None = None
    """Name of the conversation, for affinity; the header X-Session-ID does the same."""
    output_mode: Literal["tokens", "text"] | None = None
    """"text" adds each choice's text, and reports logprobs by text instead of ids; "tokens" by default."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    reasoning_ended: bool | None = None
    """A structured output applies from the first id: false is refused with one."""

    def check_supported(self) -> list[str]:
        """The names of fields that are ignored. Raises `HttpError` for what this server does not support."""
        ignored = GENERATE.check(self.model_extra)
        ignored += GENERATE_SAMPLING.check(self.sampling_params.model_extra, place="sampling_params")
        if self.reasoning_ended is False and self.sampling_params.structured_outputs is not None:
            raise HttpError(
                400,
                "reasoning_ended must not be false: a structured output applies from the first id",
                param="reasoning_ended",
            )
        if self.sampling_params.detokenize is False and self.gives_text:
            raise HttpError(
                400, "output_mode 'text' needs sampling_params.detokenize true, got false", param="output_mode"
            )
        return ignored

    @property
    def gives_text(self) -> bool:
        """Whether choices have text."""
        return self.output_mode == "text"


@router.post(
    "/inference/v1/generate",
    summary="Continue ids (vLLM's token dialect)",
    response_description="`choices` with `token_ids`, `logprobs`, `finish_reason`, `weight_versions`; or events",
)
async def _generate(body: TokenGenerateBody, request: Request) -> Response:
    """Continue `token_ids`: `choices` with `token_ids`, `logprobs` by id, and `finish_reason`."""
    context = get_context(request)
    policy = await context.policies.find(request, body.model)
    note_ignored(request, body.check_supported())
    prompt = await _place(context, body)
    sampling = body.sampling_params
    params = sampling.to_params(
        end_ids=context.get_stop_token_ids(),
        max_tokens=choose_max_tokens(
            len(prompt.token_ids), wanted=sampling.max_tokens, context_length=context.service.engine.context_length
        ),
        num_top_logprobs=sampling.logprobs or 0,
    )
    params = replace(
        params,
        return_routed_experts=bool(sampling.return_routed_experts),
        return_kept_ids=bool(sampling.return_kept_ids),
    )
    n = 1 if sampling.n is None else sampling.n
    answer_id = body.request_id or f"generate-tokens-{uuid4().hex}"
    (sample_request,) = context.service.make_requests(
        [prompt], params, n=n, policy=policy, session_id=get_session_id(request, body.session_id), name=answer_id
    )
    if body.stream:
        return await open_event_stream(_stream(context, body, sample_request, answer_id))
    (result,) = await context.service.sample([sample_request])
    writers = [_ChoiceWriter.make(context, body, index) for index in range(sample_request.n)]
    choices = await wrap_future(
        context.text_threads.submit(
            lambda: [
                writer.format_choice(one, one.finish_reason)
                for writer, one in zip(writers, result.sequences, strict=True)
            ]
        )
    )
    return json_response(
        {
            "request_id": answer_id,
            "model": context.config.model_name,
            "created": int(time.time()),
            "output_mode": body.output_mode or "tokens",
            "choices": choices,
            "usage": count_usage([result]),
            "prompt_token_ids": result.prompt_ids,
            **format_placeholders(prompt.images),
        }
    )


async def _place(context: ServerContext, body: TokenGenerateBody) -> RequestPrompt:
    ids = token_ids(body.token_ids)
    if body.features is not None and body.content_parts:
        raise HttpError(400, "give either features or content_parts, not both", param="features")
    intake = context.images
    if body.features is not None:
        return await place_features(intake, ids, body.features, body.mm_processor_kwargs)
    settings = intake.encode_settings(body.mm_processor_kwargs)
    parts = body.content_parts
    images = None if parts is None else [_find_part_source(one, f"content_parts[{k}]") for k, one in enumerate(parts)]
    (prompt,) = await intake.place([ids], [images], settings, names=lambda _: "content_parts")
    return prompt


async def _stream(
    context: ServerContext, body: TokenGenerateBody, request: SampleRequest, answer_id: str
) -> AsyncGenerator[Events]:
    """Yield one event per chunk; the first event has the prompt's ids."""
    head = {"request_id": answer_id, "output_mode": body.output_mode or "tokens"}
    prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids, **format_placeholders(request.images)}
    writers = [_ChoiceWriter.make(context, body, index) for index in range(request.n)]
    num_sampled = 0
    async with aclosing(context.service.stream([request])) as chunks:
        async for _, chunk in chunks:
            num_sampled += len(chunk.completion_ids)
            yield [{**head, **prompt, "choices": [writers[chunk.index].format_choice(chunk, chunk.finish_reason)]}]
            prompt = {}
    if body.stream_options and body.stream_options.include_usage:
        yield [{**head, "choices": [], "usage": format_usage(len(request.prompt_ids), num_sampled)}]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChoiceWriter:
    """Formats one choice, whole or in chunks."""

    context: ServerContext
    body: TokenGenerateBody
    index: int
    decoder: Any
    cutter: StopCutter

    @classmethod
    def make(cls, context: ServerContext, body: TokenGenerateBody, index: int) -> _ChoiceWriter:
        skips = body.sampling_params.skip_special_tokens is not False
        stream = context.codec.open_stream(skip_special_tokens=skips)
        return cls(context=context, body=body, index=index, decoder=stream, cutter=body.sampling_params.make_cutter())

    def format_choice(self, sampled: SampledSequence | SampleChunk, reason: FinishReason | None) -> dict[str, Any]:
        """Format a choice or a chunk of one; `reason` is None before its end."""
        choice: dict[str, Any] = {
            "index": self.index,
            "token_ids": sampled.completion_ids,
            "logprobs": self._format_logprobs(sampled),
            "finish_reason": None if reason is None else format_finish_reason(reason),
            "stop_reason": self._find_stop_id(sampled, reason),
        }
        if self.body.gives_text:
            text = self.cutter.feed(self.decoder.feed(sampled.completion_ids))
            choice["text"] = text if reason is None else text + self.cutter.cut(self.decoder.finish())
        if sampled.kept_ids is not None:
            choice["sampling_mask"] = sampled.kept_ids.to_lists()
        if reason is not None:
            choice["weight_versions"] = format_weight_versions(sampled)
            choice["routed_experts"] = write_experts(sampled.routed_experts)
        return choice

    def _format_logprobs(self, sampled: SampledSequence | SampleChunk) -> dict[str, Any] | None:
        if self.body.sampling_params.logprobs is None:
            return None
        if self.body.gives_text:
            return format_chat_logprobs(self.context.codec, sampled, as_ids=False)
        return format_token_logprobs(sampled)

    def _find_stop_id(self, sampled: SampledSequence | SampleChunk, reason: FinishReason | None) -> int | None:
        """The request's stop id that ended the choice, if any."""
        named = self.body.sampling_params.stop_token_ids or ()
        if reason is not FinishReason.STOP or not len(sampled.completion_ids):
            return None
        last = int(sampled.completion_ids[-1])
        return last if last in named else None


def _find_part_source(part: Mapping[str, Any], name: str) -> Any:
    """Find the image in an entry of `content_parts`. Raises `ImageError` if it has another type, or no image."""
    if part.get("type") not in ("image_url", "image"):
        raise ImageError(f"{name}.type must be 'image_url', got {shorten(part.get('type'))}")
    source = part.get("url", part.get(part["type"]))
    if isinstance(source, Mapping):
        source = source.get("url")
    if not isinstance(source, str):
        raise ImageError(f"{name}.url must be a data URL or sha256:..., got {shorten(source)}")
    return source
