"""The dialect of our client: `SampleRequest` and `SampleResult` as JSON, answers also in the compact form.

An unknown key is an error. `POST /v1/images` takes an image once, and requests then name it as `sha256:...`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import Field

from unbroken import compact
from unbroken.server.context import ServerContext, get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.bodies import Biases, Ids, Prompts, StrictBody, Texts, Words
from unbroken.server.http.errors import HttpError
from unbroken.server.http.event_stream import Events, open_event_stream
from unbroken.server.http.json import COMPACT_PATH, json_response, negotiated_response
from unbroken.server.images import RequestPrompt
from unbroken.server.service import SamplingService
from unbroken.server.texts import encode_prompts
from unbroken.server.turns import get_session_id
from unbroken.server.wire.images import list_images_and_spans
from unbroken.server.wire.openai import list_version_spans
from unbroken.types import (
    SampleChunk,
    SampledSequence,
    SampleRequest,
    SamplingParams,
    StructuredOutput,
    TokenIds,
    TopLogprobs,
    token_ids,
    write_experts,
    write_kept_ids,
)

router = Routes(Access.CLIENT)


class _StructuredOutputBody(StrictBody):
    """A constraint on the text, as in `StructuredOutput`."""

    regex: str | None = None
    json_schema: str | None = None
    structural_tag: str | None = None


class _SamplingBody(StrictBody):
    """The fields and defaults of `SamplingParams`."""

    max_tokens: int = 512
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Biases = Field(default_factory=list)
    allowed_token_ids: Ids = Field(default_factory=list)
    min_tokens: int = 0
    bad_words_ids: Words = Field(default_factory=list)
    seed: int | None = None
    stop_token_ids: Ids = Field(default_factory=list)
    stop_strings: Texts = Field(default_factory=list)
    structured_output: _StructuredOutputBody | None = None
    num_top_logprobs: int = 0
    return_routed_experts: bool = False
    return_kept_ids: bool = False

    def to_params(self) -> SamplingParams:
        """Convert for the engine. Raises `SamplingError` as `SamplingParams` does."""
        lists = {"stop_token_ids", "stop_strings", "logit_bias", "allowed_token_ids", "bad_words_ids"}
        values = self.model_dump(exclude={*lists, "structured_output"})
        output = self.structured_output
        return SamplingParams(
            **values,
            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids)),
            stop_strings=tuple(self.stop_strings),
            logit_bias=tuple(self.logit_bias),
            allowed_token_ids=tuple(self.allowed_token_ids),
            bad_words_ids=tuple(map(tuple, self.bad_words_ids)),
            structured_output=None if output is None else StructuredOutput(**output.model_dump()),
        )


class SampleBody(StrictBody):
    """Prompts to continue, all with the same parameters."""

    prompts: Prompts
    """All ids, or all texts, which the server encodes."""
    params: _SamplingBody = _SamplingBody()
    images: list[Any] | None = None
    """One entry for each prompt: null, an image (base64, data URL, `sha256:...`), or a list of these or `SpanBody`."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the image processor, for images that are not spans."""
    n: int = 1
    adapter: str | None = None
    session_id: str | None = None
    """Name of the conversation, for the engine's log and for affinity."""
    stream: bool = False
    """Answer with events, one per chunk and `[DONE]`; for one prompt only."""


class ScoreBody(StrictBody):
    """Sequences to score, as ids."""

    sequences: Annotated[list[Ids], Field(fail_fast=True)]
    images: list[Any] | None = None
    """As in `SampleBody`."""
    mm_processor_kwargs: dict[str, Any] | None = None
    temperature: float = 1.0
    num_top_logprobs: int = 0


@router.post(
    COMPACT_PATH,
    summary="Continue prompts (native)",
    response_description="`results`, each with `prompt_ids`, `image_sha256s`, `sequences`; compact where Accept asks",
)
async def _sample(body: SampleBody, request: Request) -> Response:
    """`{"results": [{"prompt_ids": [...], "image_sha256s": [...], "sequences": [...]}]}`, one per prompt, in order."""
    context = get_context(request)
    service = context.service
    if not body.prompts:
        raise HttpError(400, "prompts must hold at least one prompt, got []", param="prompts")
    prompts = await encode_prompts(context, body.prompts, names="prompts[{}]".format)
    requests = service.make_requests(
        await _place(context, prompts, body),
        body.params.to_params(),
        n=body.n,
        policy=await context.policies.get(request, body.adapter),
        session_id=get_session_id(request, body.session_id),
    )
    if body.stream:
        if len(requests) != 1:
            raise HttpError(400, f"stream takes exactly one prompt, got {len(requests)}", param="prompts")
        response = await open_event_stream(_stream(service, requests[0]))
        response.headers[compact.ACCEPT_HEADER] = compact.MEDIA_TYPE
        return response
    results = await service.sample(requests)
    response = negotiated_response(
        request,
        {
            "results": [
                {
                    "prompt_ids": result.prompt_ids,
                    "image_sha256s": result.image_sha256s,
                    "sequences": [_format_sequence(sequence) for sequence in result.sequences],
                }
                for result in results
            ]
        },
    )
    response.headers[compact.ACCEPT_HEADER] = compact.MEDIA_TYPE
    return response


@router.post(
    "/v1/score",
    summary="Score sequences (native)",
    response_description="`results` in order: `logprobs` of each id after the first, and `top_logprobs`",
)
async def _score(body: ScoreBody, request: Request) -> Response:
    """`{"results": [{"logprobs": [T - 1], "top_logprobs": ...}]}`, one for each sequence, in order."""
    context = get_context(request)
    sequences = [token_ids(ids, name="sequences") for ids in body.sequences]
    scored = await context.service.score(
        await _place(context, sequences, body), temperature=body.temperature, num_top_logprobs=body.num_top_logprobs
    )
    results = [{"logprobs": each.logprobs, "top_logprobs": _format_top_logprobs(each.top_logprobs)} for each in scored]
    return negotiated_response(request, {"results": results})


async def _place(context: ServerContext, prompts: list[TokenIds], body: SampleBody | ScoreBody) -> list[RequestPrompt]:
    intake = context.images
    images = list_images_and_spans(body.images, len(prompts), intake)
    return await intake.place(prompts, images, intake.encode_settings(body.mm_processor_kwargs))


async def _stream(service: SamplingService, request: SampleRequest) -> AsyncGenerator[Events]:
    prompt: dict[str, Any] = {"prompt_ids": request.prompt_ids, "image_sha256s": request.image_sha256s}
    async with aclosing(service.stream([request])) as chunks:
        async for _, chunk in chunks:
            event = {
                **prompt,
                "index": chunk.index,
                "completion_ids": chunk.completion_ids,
                "rollout_logprobs": chunk.rollout_logprobs,
                "top_logprobs": _format_top_logprobs(chunk.top_logprobs),
                "finish_reason": None if chunk.finish_reason is None else chunk.finish_reason.value,
                "policy_versions": list_version_spans(chunk),
                **_format_optional(chunk),
            }
            yield [event]
            prompt = {}


def _format_sequence(sequence: SampledSequence) -> dict[str, Any]:
    return {
        "completion_ids": sequence.completion_ids,
        "rollout_logprobs": sequence.rollout_logprobs,
        "top_logprobs": _format_top_logprobs(sequence.top_logprobs),
        "finish_reason": sequence.finish_reason.value,
        "policy_versions": list_version_spans(sequence),
        "temperature": sequence.temperature,
        **_format_optional(sequence),
    }


def _format_optional(sampled: SampledSequence | SampleChunk) -> dict[str, Any]:
    """What not every engine reports."""
    experts = sampled.routed_experts
    fields = {
        "routed_experts": None if experts is None else write_experts(experts),
        "kept_ids": write_kept_ids(sampled.kept_ids),
        "queue_s": sampled.queue_s,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _format_top_logprobs(tops: TopLogprobs | None) -> dict[str, Any] | None:
    return None if tops is None else {"token_ids": tops.token_ids, "logprobs": tops.logprobs}


_FILE: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}


@router.post(
    "/v1/images",
    summary="Send an image once",
    response_description="`sha256`, the image's name from now on, and its `width` and `height`",
    openapi_extra={"requestBody": {"required": True, "content": {"image/*": _FILE, "application/octet-stream": _FILE}}},
)
async def _upload(request: Request) -> Response:
    """Keep the file in the body: PNG, JPEG, WebP, BMP or GIF, under any content type, within the image limits."""
    image, width, height = await get_context(request).images.upload(await request.body())
    return json_response({"sha256": image.sha256, "width": width, "height": height})
