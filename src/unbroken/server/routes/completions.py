"""OpenAI's text completions: prompts as text or ids, answered at once or streamed."""

from __future__ import annotations

import time
from asyncio import wrap_future
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import Request, Response
from pydantic import Field

from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.server.context import ServerContext, get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.bodies import PromptOrPrompts
from unbroken.server.http.errors import HttpError
from unbroken.server.http.event_stream import Events, open_event_stream
from unbroken.server.http.json import json_response, note_ignored
from unbroken.server.images import RequestPrompt
from unbroken.server.texts import encode_prompts
from unbroken.server.turns import get_session_id
from unbroken.server.wire.fields import COMPLETIONS
from unbroken.server.wire.openai import (
    OpenAIFields,
    count_usage,
    format_completion_logprobs,
    format_finish_reason,
    format_prompt_logprobs,
    format_usage,
    format_weight_versions,
    list_version_spans,
)
from unbroken.types import SampleChunk, SampledSequence, SampleRequest, SampleResult, ScoredSequence

router = Routes(Access.CLIENT)
_DEFAULT_MAX_TOKENS = 16


class CompletionBody(OpenAIFields):
    """One prompt or several, as texts or lists of ids."""

    prompt: PromptOrPrompts
    logprobs: int | None = Field(default=None, ge=0)
    """How many of the most likely ids to report at each position, in addition to the sampled one."""
    prompt_logprobs: int | None = Field(default=None, ge=0)
    """From vLLM: how many of the most likely ids to report for each prompt id, in addition to it, at `temperature`."""
    best_of: int | None = None
    """Must equal `n`."""


@router.post(
    "/v1/completions",
    summary="OpenAI's text completions",
    response_description="`choices` with `text`, `logprobs`, `finish_reason`, `policy_versions`; with `stream`, events",
)
async def _completions(body: CompletionBody, request: Request) -> Response:
    """Continue texts or ids: n `choices` for each prompt, those of prompt 0 first."""
    context = get_context(request)
    note_ignored(request, COMPLETIONS.check(body.model_extra) + body.list_ignored_options())
    if body.stream and body.prompt_logprobs is not None:
        raise HttpError(400, "prompt_logprobs must be left out with stream", param="prompt_logprobs")
    if body.best_of not in (None, body.num_choices):
        raise HttpError(400, f"best_of must be n ({body.num_choices}) or left out, got {body.best_of}", param="best_of")
    prompts = await encode_prompts(context, _list_prompts(body.prompt), names=_name_prompt(body.prompt))
    if not prompts:
        raise HttpError(400, "prompt must hold at least one prompt, got []", param="prompt")
    placed = await context.images.place(prompts, [None] * len(prompts), "{}", names=lambda index: f"prompt[{index}]")
    answer_id = f"cmpl-{uuid4().hex}"
    requests = await _make_requests(context, request, body, placed, name=answer_id)
    head = {
        "id": answer_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": context.config.model_name,
    }
    if body.stream:
        return await open_event_stream(_stream(context, body, requests, head))
    scored = await _score_prompts(context, body, placed)
    results = await context.service.sample(requests)
    answer = await wrap_future(context.text_threads.submit(_format_answer, context.codec, body, results, scored))
    return json_response({**head, **answer})


def _list_prompts(prompt: Any) -> list[str | list[int]]:
    is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    return [prompt] if is_one else prompt


def _name_prompt(prompt: Any) -> Callable[[int], str]:
    return "prompt[{}]".format if isinstance(prompt, list) else lambda index: "prompt"


async def _make_requests(
    context: ServerContext, request: Request, body: CompletionBody, prompts: list[RequestPrompt], *, name: str
) -> list[SampleRequest]:
    policy = await context.policies.find(request, body.model)
    params = body.to_params(
        end_ids=context.get_stop_token_ids(),
        max_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        num_top_logprobs=body.logprobs or 0,
        structured_output=body.structured_output,
    )
    return context.service.make_requests(
        prompts,
        params,
        n=body.num_choices,
        policy=policy,
        session_id=get_session_id(request, body.session_id),
        name=name,
    )


async def _score_prompts(
    context: ServerContext, body: CompletionBody, prompts: list[RequestPrompt]
) -> list[ScoredSequence] | None:
    if body.prompt_logprobs is None:
        return None
    temperature = 1.0 if body.temperature is None else body.temperature
    return await context.service.score(prompts, temperature=temperature, num_top_logprobs=body.prompt_logprobs)


def _format_answer(
    codec: TextCodec, body: CompletionBody, results: list[SampleResult], scored: list[ScoredSequence] | None
) -> dict[str, Any]:
    sequences = [sequence for result in results for sequence in result.sequences]
    choices = [_format_choice(codec, body, index, sequence) for index, sequence in enumerate(sequences)]
    answer: dict[str, Any] = {"choices": choices, "usage": count_usage(results)}
    if body.return_token_ids:
        answer["prompt_token_ids"] = results[0].prompt_ids if len(results) == 1 else None
        for number, choice in enumerate(choices):
            choice["prompt_token_ids"] = results[number // body.num_choices].prompt_ids
    if scored is not None:
        of_prompts = [
            format_prompt_logprobs(codec, result.prompt_ids, one) for result, one in zip(results, scored, strict=True)
        ]
        for number, choice in enumerate(choices):
            choice["prompt_logprobs"] = of_prompts[number // body.num_choices]
    return answer


def _format_choice(codec: TextCodec, body: CompletionBody, index: int, sequence: SampledSequence) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": body.make_cutter().cut(codec.decode(sequence.completion_ids, skip_special_tokens=True)),
        "finish_reason": format_finish_reason(sequence.finish_reason),
        "logprobs": None,
        **_format_versions(body, sequence),
    }
    if body.logprobs is not None:
        choice["logprobs"], _ = format_completion_logprobs(
            codec, sequence, as_ids=bool(body.return_tokens_as_token_ids)
        )
    if body.return_token_ids:
        choice["token_ids"] = sequence.completion_ids
    return choice


async def _stream(
    context: ServerContext, body: CompletionBody, requests: list[SampleRequest], head: dict[str, Any]
) -> AsyncGenerator[Events]:
    """Yield the chunks of all prompts in the order they arrive."""
    n = body.num_choices
    texts = [_ChoiceText(context.codec, body) for _ in range(len(requests) * n)]
    unsent_prompts = set(range(len(requests))) if body.return_token_ids else set()
    num_sampled = 0
    async with aclosing(context.service.stream(requests)) as chunks:
        async for number, chunk in chunks:
            num_sampled += len(chunk.completion_ids)
            index = number * n + chunk.index
            choice = _format_chunk_choice(context.codec, body, index, chunk, texts[index])
            if number in unsent_prompts:
                choice["prompt_token_ids"] = requests[number].prompt_ids
                unsent_prompts.discard(number)
            yield [{**head, "choices": [choice]}]
    if body.includes_usage:
        num_prompt = sum(len(request.prompt_ids) for request in requests)
        yield [{**head, "choices": [], "usage": format_usage(num_prompt, num_sampled)}]


class _ChoiceText:
    """The text of one streamed choice. `offset` counts the characters of its ids' own texts so far."""

    def __init__(self, codec: TextCodec, body: CompletionBody) -> None:
        self._stream = codec.open_stream(skip_special_tokens=True)
        self._cutter = body.make_cutter()
        self.offset = 0

    def feed(self, chunk: SampleChunk) -> str:
        text = self._cutter.feed(self._stream.feed(chunk.completion_ids))
        if chunk.finish_reason is not None:
            text += self._cutter.cut(self._stream.finish())
        return text


def _format_chunk_choice(
    codec: TextCodec, body: CompletionBody, index: int, chunk: SampleChunk, text: _ChoiceText
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": text.feed(chunk),
        "finish_reason": None if chunk.finish_reason is None else format_finish_reason(chunk.finish_reason),
        "logprobs": None,
    }
    if body.logprobs is not None:
        as_ids = bool(body.return_tokens_as_token_ids)
        choice["logprobs"], text.offset = format_completion_logprobs(codec, chunk, as_ids=as_ids, offset=text.offset)
    if body.return_token_ids:
        choice["token_ids"] = chunk.completion_ids
    if chunk.finish_reason is not None:
        choice |= _format_versions(body, chunk)
    return choice


def _format_versions(body: CompletionBody, sampled: SampledSequence | SampleChunk) -> dict[str, Any]:
    fields: dict[str, Any] = {"policy_versions": list_version_spans(sampled)}
    if body.return_weight_versions:
        fields["weight_versions"] = format_weight_versions(sampled)
    return fields
