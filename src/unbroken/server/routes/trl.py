"""The dialect of TRL's `VLLMClient` (TRL 1.0 to 1.10; its PRs #5225, #5227, #5228).

Success is 200 and nothing else; unknown fields are ignored; each path answers with and without its trailing slash.
Beyond it, answers carry `finish_reasons` and `policy_versions`, which that client ignores.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from unbroken.errors import SamplingError
from unbroken.server.context import ServerContext, context_of
from unbroken.server.json_response import json_response
from unbroken.server.problems import HttpError
from unbroken.server.routes.native import Id, spans_object
from unbroken.types import (
    SampledSequence,
    SampleResult,
    SamplingParams,
    ScoredSequence,
    StructuredOutput,
    TokenIds,
    TopLogprobs,
    token_ids,
)

router = APIRouter()

_GENERATION_KWARGS = frozenset(
    {
        "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "seed", "stop", "stop_token_ids", "structured_outputs", "logprobs", "ignore_eos",
    }
)  # fmt: skip


class SamplingFields(BaseModel):
    """The sampling fields of /generate/ and /chat/, with that client's defaults."""

    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    logprobs: int | None = 0
    structured_outputs_regex: str | None = None
    generation_kwargs: dict[str, Any] | None = None


class GenerateBody(SamplingFields):
    """`prompts` are all texts or all lists of ids."""

    prompts: list[str] | list[list[Id]]
    images: list[list[str] | str | None] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class ChatBody(SamplingFields):
    """Conversations to answer."""

    messages: list[list[dict[str, Any]]]
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class ScoreBody(BaseModel):
    """Sequences to score from `prompt_lengths` on."""

    sequences: list[list[Id]]
    prompt_lengths: list[int]
    top_logprobs: int = Field(default=100, ge=0)
    temperature: float = 1.0
    response_format: str = "json"


@router.get("/get_world_size")
@router.get("/get_world_size/", include_in_schema=False)
async def get_world_size(request: Request) -> Response:
    """How many workers take part in a weight update."""
    return json_response({"world_size": getattr(context_of(request).service.engine, "world_size", 1)})


@router.post("/generate")
@router.post("/generate/", include_in_schema=False)
async def generate(body: GenerateBody, request: Request) -> Response:
    """Continue prompts: `prompt_ids` [P], `completion_ids`, `logprobs` and `logprob_token_ids` [P * n]."""
    context = context_of(request)
    if body.images is not None and any(images for images in body.images):
        raise HttpError(400, "this server takes no images", param="images")
    prompts = await context.text(lambda: [_prompt_ids(context, prompt) for prompt in body.prompts])
    return await _sample(context, body, prompts)


@router.post("/chat")
@router.post("/chat/", include_in_schema=False)
async def chat(body: ChatBody, request: Request) -> Response:
    """Answer conversations; the same answer as /generate/."""
    context = context_of(request)
    prompts = await context.text(lambda: _render_all(context, body))
    return await _sample(context, body, prompts)


@router.post("/get_sequence_logprobs")
@router.post("/get_sequence_logprobs/", include_in_schema=False)
async def get_sequence_logprobs(body: ScoreBody, request: Request) -> Response:
    """The most likely ids, and the given id, at each position from `prompt_lengths` on."""
    if body.response_format not in ("json", "binary"):
        raise HttpError(
            400, f"response_format must be 'json' or 'binary', got {body.response_format!r}", param="response_format"
        )
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
    scored = await context_of(request).service.score(
        [token_ids(ids, name="sequences") for ids in body.sequences],
        temperature=body.temperature,
        num_top_logprobs=body.top_logprobs,
    )
    rows = [
        _scored_row(token_ids(ids), one, length)
        for ids, one, length in zip(body.sequences, scored, body.prompt_lengths, strict=True)
    ]
    return json_response(_binary(rows, body.top_logprobs) if body.response_format == "binary" else _json(rows))


@router.post("/reset_prefix_cache")
@router.post("/reset_prefix_cache/", include_in_schema=False)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget keys and values of finished requests."""
    await context_of(request).service.engine.reset_prefix_cache()
    return json_response({"message": "the prefix cache is empty"})


@router.post("/init_communicator")
@router.post("/init_communicator/", include_in_schema=False)
@router.post("/update_named_param")
@router.post("/update_named_param/", include_in_schema=False)
@router.post("/close_communicator")
@router.post("/close_communicator/", include_in_schema=False)
async def no_communicator(request: Request) -> Response:
    """Refuse: weights come over no communicator yet."""
    raise HttpError(400, f"{request.url.path} is not served: this server takes no weight updates over a communicator")


def _prompt_ids(context: ServerContext, prompt: str | list[int]) -> TokenIds:
    return context.codec.encode(prompt) if isinstance(prompt, str) else token_ids(prompt, name="prompts")


def _render_all(context: ServerContext, body: ChatBody) -> list[TokenIds]:
    renderer = context.renderer(body.chat_template_kwargs)
    tools: Any = body.tools or ()
    return [renderer.render(messages, tools=tools).token_ids for messages in _as_messages(body.messages)]


def _as_messages(conversations: list[list[dict[str, Any]]]) -> Any:
    return conversations


async def _sample(context: ServerContext, body: SamplingFields, prompts: list[TokenIds]) -> Response:
    fields = _merged(body)
    n = fields.pop("n")
    params = _params(fields, context.stop_token_ids())
    results = await context.service.sample(context.service.make_requests(prompts, params, n=n))
    return json_response(_answer(results, fields["logprobs"]))


def _merged(body: SamplingFields) -> dict[str, Any]:
    """The sampling fields, overridden by `generation_kwargs`."""
    extra = body.generation_kwargs or {}
    if unknown := sorted(set(extra) - _GENERATION_KWARGS):
        raise SamplingError(
            f"generation_kwargs must be among {sorted(_GENERATION_KWARGS)}, got {unknown}: this server samples exactly "
            "as asked, and does not know how"
        )
    fields = body.model_dump(include=set(SamplingFields.model_fields) - {"generation_kwargs"})
    return {**fields, **extra}


def _params(fields: dict[str, Any], stop_token_ids: tuple[int, ...]) -> SamplingParams:
    stop = fields.get("stop") or ()
    structured = fields.get("structured_outputs") or {}
    if not isinstance(structured, dict) or set(structured) - {"regex", "json"}:
        raise SamplingError(f"structured_outputs must be an object with regex or json, got {structured!r}")
    regex = fields["structured_outputs_regex"] or structured.get("regex")
    schema = structured.get("json")
    own_stops = () if fields.get("ignore_eos") else stop_token_ids
    return SamplingParams(
        max_tokens=fields["max_tokens"],
        temperature=fields["temperature"],
        top_p=fields["top_p"],
        top_k=0 if fields["top_k"] == -1 else fields["top_k"],
        min_p=fields["min_p"],
        repetition_penalty=fields["repetition_penalty"],
        presence_penalty=fields.get("presence_penalty", 0.0),
        frequency_penalty=fields.get("frequency_penalty", 0.0),
        seed=fields.get("seed"),
        stop_token_ids=tuple(sorted({*own_stops, *(fields.get("stop_token_ids") or ())})),
        stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
        structured_output=None
        if regex is None and schema is None
        else StructuredOutput(regex=regex, json_schema=schema),
        num_top_logprobs=fields["logprobs"] or 0,
    )


def _answer(results: list[SampleResult], logprobs: int | None) -> dict[str, Any]:
    sequences = [sequence for result in results for sequence in result.sequences]
    answer: dict[str, Any] = {
        "prompt_ids": [result.prompt_ids for result in results],
        "completion_ids": [sequence.completion_ids for sequence in sequences],
        "logprobs": None,
        "logprob_token_ids": None,
        "finish_reasons": [sequence.finish_reason.value for sequence in sequences],
        "policy_versions": [spans_object(sequence) for sequence in sequences],
    }
    if logprobs is not None:
        rows = [_with_tops(*_facts(sequence)) for sequence in sequences]
        answer["logprobs"] = [logprobs_CK for logprobs_CK, _ in rows]
        answer["logprob_token_ids"] = [ids_CK for _, ids_CK in rows]
    return answer


def _facts(sequence: SampledSequence) -> tuple[TokenIds, Any, TopLogprobs | None]:
    return sequence.completion_ids, sequence.rollout_logprobs, sequence.top_logprobs


def _with_tops(ids: TokenIds, logprobs: Any, tops: TopLogprobs | None) -> tuple[Any, Any]:
    """[C][k] logprobs and ids in rank order: the most likely ones, and the given id last where it is none of them."""
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


def _scored_row(ids: TokenIds, scored: ScoredSequence, prompt_length: int) -> tuple[TokenIds, Any, TopLogprobs | None]:
    """The ids from `prompt_length` on, with their logprobs."""
    start = prompt_length - 1
    tops = scored.top_logprobs
    if tops is not None:
        tops = TopLogprobs(token_ids=tops.token_ids[start:], logprobs=tops.logprobs[start:])
    return ids[prompt_length:], scored.logprobs[start:], tops


def _json(rows: list[tuple[TokenIds, Any, TopLogprobs | None]]) -> dict[str, Any]:
    shown = [_with_tops(*row) for row in rows]
    return {"logprobs": [one for one, _ in shown], "logprob_token_ids": [ids for _, ids in shown]}


def _binary(rows: list[tuple[TokenIds, Any, TopLogprobs | None]], num_tops: int) -> dict[str, Any]:
    """Base64 of little-endian arrays: [B, L, k] of the most likely ids, [B, L, 1] of the given ones; -inf pads."""
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
