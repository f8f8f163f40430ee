"""OpenAI's text completions: prompts as text or ids, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from pydantic import Field

from unbroken.rendering.codec import TextCodec
from unbroken.server.context import ServerContext, context_of
from unbroken.server.json_response import json_response
from unbroken.server.problems import HttpError
from unbroken.server.routes.native import Id, spans_object
from unbroken.server.routes.openai_fields import OpenAIFields, usage_object, usage_of_results
from unbroken.server.streaming import event_stream
from unbroken.server.wire_logprobs import completion_logprobs
from unbroken.types import SampleChunk, SampledSequence, SampleRequest, SampleResult, TokenIds, token_ids

router = APIRouter()
_DEFAULT_MAX_TOKENS = 16


class CompletionBody(OpenAIFields):
    """One prompt or several, as texts or lists of ids."""

    prompt: str | list[str] | list[Id] | list[list[Id]]
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """`choices` of prompt 0 first, n for each prompt."""
    context = context_of(request)
    context.check_model(body.model)
    for name in ("echo", "suffix"):
        if getattr(body, name):
            raise HttpError(400, f"{name} is not supported", param=name)
    if body.best_of not in (None, body.num_choices):
        raise HttpError(400, f"best_of must be n ({body.num_choices}) or absent, got {body.best_of}", param="best_of")
    prompts = await context.text(lambda: _prompts(context.codec, body.prompt))
    requests = _requests(context, body, prompts)
    head = {
        "id": f"cmpl-{uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": context.config.model_name,
    }
    if body.stream:
        return await event_stream(_stream(context, body, requests, head))
    results = await context.service.sample(requests)
    answer = await context.text(lambda: _answer(context.codec, body, results))
    return json_response({**head, **answer})


def _prompts(codec: TextCodec, prompt: Any) -> list[TokenIds]:
    if isinstance(prompt, str):
        return [codec.encode(prompt)]
    if all(isinstance(item, int) for item in prompt) and prompt:
        return [token_ids(prompt, name="prompt")]
    return [codec.encode(item) if isinstance(item, str) else token_ids(item, name="prompt") for item in prompt]


def _requests(context: ServerContext, body: CompletionBody, prompts: list[TokenIds]) -> list[SampleRequest]:
    wanted = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = body.params(
        stop_token_ids=context.stop_token_ids(), max_tokens=wanted, num_top_logprobs=body.logprobs or 0
    )
    return context.service.make_requests(prompts, params, n=body.num_choices)


def _answer(codec: TextCodec, body: CompletionBody, results: list[SampleResult]) -> dict[str, Any]:
    sequences = [sequence for result in results for sequence in result.sequences]
    choices = [_choice(codec, body, index, sequence) for index, sequence in enumerate(sequences)]
    answer: dict[str, Any] = {"choices": choices, "usage": usage_of_results(results)}
    if body.return_token_ids:
        answer["prompt_token_ids"] = results[0].prompt_ids if len(results) == 1 else None
        for number, choice in enumerate(choices):
            choice["prompt_token_ids"] = results[number // body.num_choices].prompt_ids
    return answer


def _choice(codec: TextCodec, body: CompletionBody, index: int, sequence: SampledSequence) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": codec.decode(sequence.completion_ids, skip_special_tokens=True),
        "finish_reason": sequence.finish_reason.value,
        "logprobs": None,
        "policy_versions": spans_object(sequence),
    }
    if body.logprobs is not None:
        choice["logprobs"] = completion_logprobs(codec, sequence, as_ids=bool(body.return_tokens_as_token_ids))
    if body.return_token_ids:
        choice["token_ids"] = sequence.completion_ids
    return choice


async def _stream(
    context: ServerContext, body: CompletionBody, requests: list[SampleRequest], head: dict[str, Any]
) -> AsyncGenerator[dict[str, Any]]:
    """Prompt after prompt, as the chunks come."""
    num_prompt = num_sampled = 0
    for number, request in enumerate(requests):
        texts = [context.codec.open_stream(skip_special_tokens=True) for _ in range(request.n)]
        num_prompt += len(request.prompt_ids)
        is_first = True
        async for chunk in context.service.stream(request):
            text = texts[chunk.index].feed(chunk.completion_ids)
            if chunk.finish_reason is not None:
                text += texts[chunk.index].finish()
            num_sampled += len(chunk.completion_ids)
            choice = _chunk_choice(context.codec, body, number * request.n + chunk.index, chunk, text)
            if is_first and body.return_token_ids:
                choice["prompt_token_ids"] = request.prompt_ids
            is_first = False
            yield {**head, "choices": [choice]}
    if body.includes_usage:
        yield {**head, "choices": [], "usage": usage_object(num_prompt, num_sampled)}


def _chunk_choice(codec: TextCodec, body: CompletionBody, index: int, chunk: SampleChunk, text: str) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": text,
        "finish_reason": None if chunk.finish_reason is None else chunk.finish_reason.value,
        "logprobs": None,
    }
    if body.logprobs is not None:
        choice["logprobs"] = completion_logprobs(codec, chunk, as_ids=bool(body.return_tokens_as_token_ids))
    if body.return_token_ids:
        choice["token_ids"] = chunk.completion_ids
    if chunk.finish_reason is not None:
        choice["policy_versions"] = spans_object(chunk)
    return choice
