"""The dialect of TRL's `VLLMClient` (TRL 1.0 to 1.10; its PRs #5225, #5227, #5228).

Success is always 200, unknown fields are ignored, and each path works with and without its trailing slash. We add
`finish_reasons`, `policy_versions` and `image_sha256s` to answers, which that client ignores.
"""

from __future__ import annotations

import base64
from asyncio import wrap_future
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from fastapi import Request, Response
from pydantic import Field, ValidationError

from unbroken.engines.checks import require_updatable
from unbroken.server.context import ServerContext, get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.bodies import BodyModel, Ids, ObjectOrObjects, Objects, Prompts
from unbroken.server.http.errors import HttpError, field_error
from unbroken.server.http.json import json_response, note_ignored
from unbroken.server.images import RequestPrompt
from unbroken.server.texts import check_conversation, encode_prompts
from unbroken.server.wire.conversation import Tools
from unbroken.server.wire.fields import CHAT, GENERATION_KWARGS
from unbroken.server.wire.images import list_images
from unbroken.server.wire.openai import SamplingFields, list_version_spans
from unbroken.types import (
    SampledSequence,
    SampleResult,
    ScoredSequence,
    StructuredOutput,
    TokenIds,
    TopLogprobs,
    token_ids,
)

router = Routes(Access.CLIENT)
_Row: TypeAlias = tuple[TokenIds, Any, TopLogprobs | None]
"""Ids with their logprobs, and the most likely ids."""


class Sampling(SamplingFields):
    """The parameters that `generation_kwargs` may have."""

    n: int = 1
    max_tokens: int = 16
    logprobs: int | None = Field(default=0, ge=0)
    """How many of the most likely ids to report with the sampled one; null for no logprobs."""


class TrlSamplingBody(Sampling):
    """The sampling fields of /generate/ and /chat/."""

    structured_outputs_regex: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the image processor for all images, such as `max_pixels`."""
    generation_kwargs: dict[str, Any] | None = None
    """Overrides the other fields."""


class GenerateBody(TrlSamplingBody):
    """Prompts to continue."""

    prompts: Prompts
    images: list[Any] | None = None
    """One entry for each prompt: null, an image (base64, data URL, `sha256:...`), or a list of images."""
    mm_processor_kwargs: ObjectOrObjects | None = None  # type: ignore[assignment]
    """Settings of the image processor for all images, such as `max_pixels`, or a list with those of each prompt."""


class TrlChatBody(TrlSamplingBody):
    """Conversations to answer."""

    messages: Annotated[list[Objects], Field(fail_fast=True)]
    chat_template: Any = None
    """Must be left out: the server renders with its own template."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None


class TrlScoreBody(BodyModel):
    """Sequences to score, each from its prompt's length on."""

    sequences: Annotated[list[Ids], Field(fail_fast=True)]
    prompt_lengths: Annotated[list[int], Field(fail_fast=True)]
    top_logprobs: int = Field(default=100, ge=0)
    temperature: float = 1.0
    response_format: Literal["json", "binary"] = "json"


@router.get("/get_world_size", summary="Workers that hold the weights (TRL)")
@router.get("/get_world_size/", include_in_schema=False)
async def _get_world_size(request: Request) -> Response:
    """How many workers take part in a weight update."""
    return json_response({"world_size": require_updatable(get_context(request).service.engine).world_size})


@router.post(
    "/generate",
    summary="Continue prompts (TRL)",
    response_description="`prompt_ids` [P]; `completion_ids`, `logprobs`, `logprob_token_ids` and ours [P * n]",
)
@router.post("/generate/", include_in_schema=False)
async def _generate(body: GenerateBody, request: Request) -> Response:
    """Continue prompts: `prompt_ids` [P], `completion_ids`, `logprobs` and `logprob_token_ids` [P * n]."""
    context = get_context(request)
    images = list_images(body.images, len(body.prompts))
    settings = _list_settings(context, body.mm_processor_kwargs, len(body.prompts))
    prompts = await encode_prompts(context, body.prompts, names="prompts[{}]".format)
    return await _sample(context, body, await context.images.place(prompts, images, settings))


@router.post("/chat", summary="Answer conversations (TRL)", response_description="as for /generate")
@router.post("/chat/", include_in_schema=False)
async def _chat(body: TrlChatBody, request: Request) -> Response:
    """Answer conversations, in the form of /generate."""
    context = get_context(request)
    CHAT.check({"chat_template": body.chat_template})
    settings = context.images.encode_settings(body.mm_processor_kwargs)
    conversations = await context.images.load_conversations(body.messages, settings)
    tools: Any = body.tools or ()
    note_ignored(request, await context.find_ineffective(tools, body.chat_template_kwargs or {}))
    prompts = await wrap_future(context.text_threads.submit(_render_all, context, body, conversations, settings))
    return await _sample(context, body, prompts)


@router.post(
    "/get_sequence_logprobs",
    summary="Score sequences (TRL)",
    response_description="`logprobs` and `logprob_token_ids` [B][L][k], or base64 arrays",
)
@router.post("/get_sequence_logprobs/", include_in_schema=False)
async def _get_sequence_logprobs(body: TrlScoreBody, request: Request) -> Response:
    """Report the most likely ids, and the given id, at each position from `prompt_lengths` on."""
    if len(body.prompt_lengths) != len(body.sequences):
        raise HttpError(
            400,
            f"prompt_lengths must have one entry per sequence: got {len(body.prompt_lengths)} for "
            f"{len(body.sequences)} sequences",
            param="prompt_lengths",
        )
    for index, (length, ids) in enumerate(zip(body.prompt_lengths, body.sequences, strict=True)):
        if not 1 <= length <= len(ids):
            raise HttpError(
                400, f"prompt_lengths[{index}] must lie in [1, {len(ids)}], got {length}", param="prompt_lengths"
            )
    context = get_context(request)
    sequences = [token_ids(ids, name="sequences") for ids in body.sequences]
    scored = await context.service.score(
        await context.images.place(sequences, [None] * len(sequences), "{}", names="sequences[{}]".format),
        temperature=body.temperature,
        num_top_logprobs=body.top_logprobs,
    )
    rows = [
        _slice_scores(token_ids(ids), one, length)
        for ids, one, length in zip(body.sequences, scored, body.prompt_lengths, strict=True)
    ]
    return json_response(
        _format_binary(rows, body.top_logprobs) if body.response_format == "binary" else _format_json(rows)
    )


def _list_settings(context: ServerContext, given: Any, num_prompts: int) -> str | list[str]:
    if not isinstance(given, list):
        return context.images.encode_settings(given)
    if len(given) != num_prompts:
        raise HttpError(
            400,
            f"mm_processor_kwargs must have one entry per prompt: got {len(given)} for {num_prompts} prompts",
            param="mm_processor_kwargs",
        )
    return [context.images.encode_settings(one, name=f"mm_processor_kwargs[{k}]") for k, one in enumerate(given)]


def _render_all(
    context: ServerContext, body: TrlChatBody, conversations: list[Any], settings: str
) -> list[RequestPrompt]:
    renderer = context.get_renderer(body.chat_template_kwargs, settings)
    tools: Any = body.tools or ()
    for index, messages in enumerate(conversations):
        check_conversation(context, messages, tools, body.chat_template_kwargs, name=f"messages[{index}]")
    rendered = [renderer.render(messages, tools=tools) for messages in conversations]
    return [RequestPrompt(token_ids=one.token_ids, images=one.images) for one in rendered]


async def _sample(context: ServerContext, body: TrlSamplingBody, prompts: list[RequestPrompt]) -> Response:
    fields = _merge_sampling(body)
    regex = body.structured_outputs_regex
    params = fields.to_params(
        end_ids=context.get_stop_token_ids(),
        max_tokens=fields.max_tokens,
        num_top_logprobs=fields.logprobs or 0,
        structured_output=None if regex is None else StructuredOutput(regex=regex),
    )
    results = await context.service.sample(context.service.make_requests(prompts, params, n=fields.n))
    return json_response(_format_answer(results, with_logprobs=fields.logprobs is not None))


def _merge_sampling(body: TrlSamplingBody) -> Sampling:
    """Merge the sampling fields with `generation_kwargs`, which win."""
    known = Sampling.model_fields
    extra = body.generation_kwargs or {}
    unknown = {name: value for name, value in extra.items() if name not in known}
    GENERATION_KWARGS.check(unknown, place="generation_kwargs")
    given = body.model_dump(include=set(known), exclude_unset=True, by_alias=True)
    try:
        return Sampling.model_validate({**given, **{name: extra[name] for name in extra if name in known}})
    except ValidationError as error:
        raise field_error(error, within="generation_kwargs") from None


def _format_answer(results: list[SampleResult], *, with_logprobs: bool) -> dict[str, Any]:
    sequences = [sequence for result in results for sequence in result.sequences]
    return {
        "prompt_ids": [result.prompt_ids for result in results],
        "completion_ids": [sequence.completion_ids for sequence in sequences],
        **(_format_logprobs(sequences) if with_logprobs else {"logprobs": None, "logprob_token_ids": None}),
        "finish_reasons": [sequence.finish_reason.value for sequence in sequences],
        "policy_versions": [list_version_spans(sequence) for sequence in sequences],
        "image_sha256s": [result.image_sha256s for result in results],
    }


def _format_logprobs(sequences: Sequence[SampledSequence]) -> dict[str, Any]:
    rows = [_rank_logprobs(one.completion_ids, one.rollout_logprobs, one.top_logprobs) for one in sequences]
    return {"logprobs": [logprobs_CK for logprobs_CK, _ in rows], "logprob_token_ids": [ids_CK for _, ids_CK in rows]}


def _rank_logprobs(ids: TokenIds, logprobs: Any, tops: TopLogprobs | None) -> tuple[Any, Any]:
    """[C][k] logprobs and ids in rank order: the most likely ones, then the given id if it is not among them."""
    if tops is None:
        return logprobs[:, None], ids[:, None]
    is_top = (tops.token_ids == ids[:, None]).any(axis=1)
    all_logprobs = np.concatenate([tops.logprobs, logprobs[:, None]], axis=1)
    all_ids = np.concatenate([tops.token_ids, ids[:, None]], axis=1)
    num_tops = tops.token_ids.shape[1]
    widths = np.where(is_top, num_tops, num_tops + 1).tolist()
    return (
        [row[:width] for row, width in zip(all_logprobs, widths, strict=True)],
        [row[:width] for row, width in zip(all_ids, widths, strict=True)],
    )


def _slice_scores(ids: TokenIds, scored: ScoredSequence, prompt_length: int) -> _Row:
    start = prompt_length - 1
    tops = scored.top_logprobs
    if tops is not None:
        tops = TopLogprobs(token_ids=tops.token_ids[start:], logprobs=tops.logprobs[start:])
    return ids[prompt_length:], scored.logprobs[start:], tops


def _format_json(rows: list[_Row]) -> dict[str, Any]:
    ranked = [_rank_logprobs(*row) for row in rows]
    return {"logprobs": [one for one, _ in ranked], "logprob_token_ids": [ids for _, ids in ranked]}


def _format_binary(rows: list[_Row], num_tops: int) -> dict[str, Any]:
    """Base64 of little-endian arrays: [B, L, k] most likely ids, [B, L, 1] given ids; -inf is padding."""
    lengths = [len(ids) for ids, _, _ in rows]
    num_rows, longest, width = len(rows), max(lengths, default=0), max(num_tops, 1)
    top_logprobs = np.full((num_rows, longest, width), -np.inf, dtype="<f4")
    top_ids = np.zeros((num_rows, longest, width), dtype="<i4")
    actual_logprobs = np.full((num_rows, longest, 1), -np.inf, dtype="<f4")
    actual_ids = np.zeros((num_rows, longest, 1), dtype="<i4")
    for row, (ids, logprobs, tops) in enumerate(rows):
        actual_logprobs[row, : len(ids), 0], actual_ids[row, : len(ids), 0] = logprobs, ids
        top_logprobs[row, : len(ids)] = logprobs[:, None] if tops is None else tops.logprobs
        top_ids[row, : len(ids)] = ids[:, None] if tops is None else tops.token_ids
    return {
        "logprobs_b64": _base64(top_logprobs),
        "token_ids_b64": _base64(top_ids),
        "actual_logprobs_b64": _base64(actual_logprobs),
        "actual_token_ids_b64": _base64(actual_ids),
        "shape": [num_rows, longest, width],
        "completion_lengths": lengths,
    }


def _base64(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()
