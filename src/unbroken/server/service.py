"""Runs the requests of all dialects on the engine: checked, within the server's limits, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from uuid import uuid4

from unbroken.counters import Event
from unbroken.engines.base import Engine
from unbroken.engines.checks import check_request, check_scorable, check_top_logprobs
from unbroken.errors import InvalidInputError
from unbroken.server.admission import Admission, make_request_id
from unbroken.server.concurrency import merge_streams, run_all
from unbroken.server.config import Limits
from unbroken.server.http.errors import HttpError
from unbroken.server.images.intake import Prompt
from unbroken.server.metrics import Metrics
from unbroken.types import (
    FinishReason,
    SampleChunk,
    SampleRequest,
    SampleResult,
    SamplingParams,
    ScoredSequence,
)


class SamplingService:
    """Runs requests of any dialect on one engine.

    A call answers all of its requests or raises: if one fails, the others are cancelled, and the engine aborts them.
    """

    def __init__(self, engine: Engine, *, limits: Limits, metrics: Metrics) -> None:
        self.engine = engine
        self.limits = limits
        self.metrics = metrics
        self.admission = Admission(engine, limits=limits, metrics=metrics)

    def make_requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        n: int = 1,
        adapter: str | None = None,
        session_id: str | None = None,
        name: str | None = None,
    ) -> list[SampleRequest]:
        """Make one request for each prompt. All are checked before one is run.

        `name` is what the caller calls them, for `Admission.abort`: by default the session's name.

        Raises:
            HttpError: there are more prompts or completions than the limits allow.
            SamplingError: the engine cannot continue a prompt; the message names its index.
        """
        self.check_size(len(prompts), n)
        self._check_num_top_logprobs(params.num_top_logprobs)
        name, unique = name or session_id or uuid4().hex, uuid4().hex[:8]
        requests = []
        for index, prompt in enumerate(prompts):
            try:
                request = SampleRequest(
                    request_id=make_request_id(name, unique, index),
                    prompt_ids=prompt.token_ids,
                    images=prompt.images,
                    params=params,
                    n=n,
                    adapter=adapter,
                    session_id=session_id,
                )
                check_request(request, vocab_size=self.engine.vocab_size, context_length=self.engine.context_length)
            except InvalidInputError as error:
                raise add_place(error, "prompts", index, len(prompts)) from None
            requests.append(request)
        return requests

    def check_size(self, num_prompts: int, n: int) -> None:
        """Raise `HttpError` if a request is larger than the limits allow."""
        if num_prompts > self.limits.max_prompts:
            raise HttpError(
                400,
                f"a request may have at most {self.limits.max_prompts} prompts (max_prompts), got {num_prompts}",
                param="prompts",
            )
        if not 1 <= n <= self.limits.max_n:
            raise HttpError(400, f"n must lie in [1, {self.limits.max_n}], got {n}", param="n")

    def _check_num_top_logprobs(self, number: int) -> None:
        """The answer's arrays grow with the number: without a limit they could have gigabytes."""
        check_top_logprobs(number, maximum=min(self.limits.max_top_logprobs, self.engine.vocab_size))

    async def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Sample the requests; results come in the same order, each with the prompt it was made for (I3).

        Raises:
            HttpError: the queue is full.
            TimeoutError: sampling took longer than `request_timeout_s`.
            EngineError: the engine failed.
        """
        with self._admit(requests):
            async with asyncio.timeout(self.limits.request_timeout_s):
                if len(requests) == 1:  # without the costs of a task
                    results = [await self.engine.sample(requests[0])]
                else:
                    results = await run_all(self.engine.sample(request) for request in requests)
        for request, result in zip(requests, results, strict=True):
            result.check_answers(request)
            for sequence in result.sequences:
                self._count_ids(len(sequence.completion_ids), sequence.finish_reason)
        return results

    async def stream(self, requests: Sequence[SampleRequest]) -> AsyncGenerator[tuple[int, SampleChunk]]:
        """Yield the engine's chunks as they arrive, with the index of their request. Raises as `sample` does.

        The engine checks its prompts itself (I3).
        """
        with self._admit(requests):
            streams = [self.engine.stream(request) for request in requests]
            async with asyncio.timeout(self.limits.request_timeout_s), aclosing(merge_streams(streams)) as chunks:
                async for index, chunk in chunks:
                    self._count_ids(len(chunk.completion_ids), chunk.finish_reason)
                    yield index, chunk

    async def score(
        self, sequences: Sequence[Prompt], *, temperature: float, num_top_logprobs: int
    ) -> list[ScoredSequence]:
        """Compute the logprobs of given sequences. Raises as `sample` does."""
        self.check_size(len(sequences), 1)
        self._check_num_top_logprobs(num_top_logprobs)
        engine = self.engine
        for index, sequence in enumerate(sequences):
            try:
                check_scorable(
                    sequence.token_ids,
                    temperature=temperature,
                    vocab_size=engine.vocab_size,
                    context_length=engine.context_length,
                )
            except InvalidInputError as error:
                raise add_place(error, "sequences", index, len(sequences)) from None
        with self.admission.reserve(len(sequences)):
            async with asyncio.timeout(self.limits.request_timeout_s):
                return await run_all(
                    engine.score(
                        sequence.token_ids,
                        images=sequence.images,
                        temperature=temperature,
                        num_top_logprobs=num_top_logprobs,
                    )
                    for sequence in sequences
                )

    @contextmanager
    def _admit(self, requests: Sequence[SampleRequest]) -> Iterator[None]:
        with self.admission.admit(requests):
            self.metrics.prompt_ids.inc(sum(len(request.prompt_ids) for request in requests))
            yield

    def _count_ids(self, number: int, finish_reason: FinishReason | None) -> None:
        self.metrics.sampled_ids.inc(number)
        if finish_reason is FinishReason.LENGTH:
            self.metrics.events.count(Event.TRUNCATION, finish_reason)
        if finish_reason is not None:
            self.metrics.finished.labels(finish_reason=finish_reason.value).inc()


def add_place(error: InvalidInputError, field: str, index: int, number: int) -> InvalidInputError:
    """Put the place of an invalid entry before the error's message, if there are several entries."""
    if number > 1:
        error.args = (f"{field}[{index}]: {error}",)
    return error
