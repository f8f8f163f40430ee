"""Runs the requests of all dialects on the engine: checked, admitted within the server's limits, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from enum import StrEnum
from uuid import uuid4

from unbroken.counters import Event
from unbroken.engines.base import Engine, stream_request
from unbroken.engines.checks import check_request, check_scorable, check_top_logprobs, require_pausable, require_scoring
from unbroken.errors import InvalidInputError, UnknownPolicyError
from unbroken.server.concurrency import merge_streams, run_all
from unbroken.server.config import ServerLimits
from unbroken.server.http.errors import HttpError
from unbroken.server.images import RequestPrompt
from unbroken.server.metrics import Metrics
from unbroken.server.policies import Policy
from unbroken.types import (
    FinishReason,
    SampleChunk,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SamplingParams,
    ScoredSequence,
)

_LOOK_AGAIN_S = 0.05


class PauseMode(StrEnum):
    """What a pause does to requests."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class _Admission:
    """Which requests of one engine may run now: the queue's limit, pauses as in vLLM, and aborts by name.

    mode     requests in flight              new requests
    keep     wait until `resume`             wait
    abort    end with what they have         503
    wait     finish                          503
    """

    def __init__(self, engine: Engine, *, limits: ServerLimits, metrics: Metrics) -> None:
        self._engine = engine
        self._limits = limits
        self._metrics = metrics
        self._num_admitted = 0
        self._running: dict[str, SampleRequest] = {}
        """The requests in flight, by id."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._paused: PauseMode | None = None

    @property
    def is_paused(self) -> bool:
        """Whether a pause lasts."""
        return self._paused is not None

    @property
    def num_running(self) -> int:
        """Requests in flight, those that wait included."""
        return len(self._running)

    @contextmanager
    def admit(self, requests: Sequence[SampleRequest]) -> Iterator[None]:
        """Count requests as running; `HttpError` if there is no room, or a pause refuses them."""
        with self.reserve(sum(request.n for request in requests)):
            self._running |= {request.request_id: request for request in requests}
            try:
                yield
            finally:
                for request in requests:
                    del self._running[request.request_id]

    @contextmanager
    def reserve(self, num_completions: int) -> Iterator[None]:
        """Take places in the queue; `HttpError` if there is no room, or a pause refuses them."""
        self._check_open()
        self._check_room(num_completions)
        self._count(num_completions)
        try:
            yield
        finally:
            self._count(-num_completions)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause; returns once no request samples, or the pause is over.

        `clear_cache` drops cached keys and values, except with KEEP. If the engine refuses, nothing is paused that was
        not before; requests that were aborted stay so.
        """
        earlier, self._paused = self._paused, mode
        try:
            if mode is PauseMode.KEEP:
                await require_pausable(self._engine).pause()
                return
            if earlier is PauseMode.KEEP:
                await require_pausable(self._engine).resume()
                earlier = None
            await self._wait_until_idle()
            if clear_cache and self._refuses:
                await require_pausable(self._engine).reset_prefix_cache()
        except Exception:
            if self._paused is mode:  # and nobody has resumed or paused since
                self._paused = earlier
            raise

    async def _wait_until_idle(self) -> None:
        """Wait for the requests in flight, or abort them, unless the pause ends or becomes KEEP."""
        while self._refuses and self._num_admitted:
            if self._paused is PauseMode.ABORT:
                await self.abort()  # each time: a request that is still prepared cannot be aborted yet
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), _LOOK_AGAIN_S)

    async def resume(self) -> None:
        """End the pause. ABORT and WAIT pause nothing but the queue; otherwise the engine is asked."""
        if not self._refuses:
            await require_pausable(self._engine).resume()
        self._paused = None

    async def abort(self, names: Collection[str] | None = None) -> int:
        """Abort requests by the names that their callers know, sessions' included, or all; returns how many."""
        ids = [
            request_id
            for request_id, request in self._running.items()
            if names is None or _get_name(request_id) in names or request.session_id in names
        ]
        for request_id in ids:
            await self._engine.abort(request_id)
        return len(ids)

    def _count(self, num_completions: int) -> None:
        self._num_admitted += num_completions
        self._metrics.in_flight.set(self._num_admitted)
        if self._num_admitted:
            self._idle.clear()
        else:
            self._idle.set()

    @property
    def _refuses(self) -> bool:
        return self._paused in (PauseMode.ABORT, PauseMode.WAIT)

    def _check_open(self) -> None:
        if self._paused is not None and self._refuses:
            raise HttpError(
                503,
                f"the server is paused (mode {self._paused.value!r}): try again after POST /resume",
                code="paused",
                headers={"Retry-After": str(self._limits.retry_after_s)},
            )

    def _check_room(self, num_completions: int) -> None:
        maximum = self._limits.max_queued
        if num_completions > maximum:
            raise HttpError(
                400,
                f"a request may have at most {maximum} completions (max_queued), got {num_completions} (prompts times "
                "n)",
                param="n",
            )
        if self._num_admitted + num_completions > maximum:
            self._metrics.refused_busy.inc()
            raise HttpError(
                429,
                f"the queue has {self._num_admitted} of at most {maximum} completions (max_queued), no room for "
                f"{num_completions} more: try again later",
                code="queue_full",
                headers={"Retry-After": str(self._limits.retry_after_s)},
            )


def _make_request_id(name: str, unique: str, index: int) -> str:
    """The engine's id of the request for prompt `index` of a call; `name` is the one that the caller knows."""
    return f"{name}-{unique}-{index}"


def _get_name(request_id: str) -> str:
    """The caller's name for a request."""
    return request_id.rsplit("-", 2)[0]


class SamplingService:
    """Runs requests of any dialect on one engine.

    A call answers all of its requests or raises: if one fails, the others are cancelled, and the engine aborts them.
    """

    def __init__(self, engine: Engine, *, limits: ServerLimits, metrics: Metrics) -> None:
        self.engine = engine
        self.limits = limits
        self.metrics = metrics
        self.admission = _Admission(engine, limits=limits, metrics=metrics)

    def make_requests(
        self,
        prompts: Sequence[RequestPrompt],
        params: SamplingParams,
        *,
        n: int = 1,
        policy: Policy | None = None,
        session_id: str | None = None,
        name: str | None = None,
    ) -> list[SampleRequest]:
        """Make one request for each prompt. All are checked before one is run.

        `policy` is by default the served model.
        `name` is what the caller calls them, for `_Admission.abort`: by default the session's name.

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
                    request_id=_make_request_id(name, unique, index),
                    prompt_ids=prompt.token_ids,
                    images=prompt.images,
                    params=params,
                    n=n,
                    adapter=None if policy is None else policy.adapter,
                    policy_version=None if policy is None else policy.version,
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

    async def sample(self, requests: Sequence[SampleRequest], *, may_go_on: bool = False) -> list[SampleResult]:
        """Sample the requests; results come in the same order, each with the prompt it was made for (I3).

        `may_go_on` says that a completion which its `max_tokens` cuts may be the first part of a reply: it is not
        counted as ended (`count_end`).

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
            _check_version(request, *result.sequences)
            for sequence in result.sequences:
                self._count_ids(len(sequence.completion_ids), sequence.finish_reason, may_go_on=may_go_on)
        return results

    async def stream(
        self, requests: Sequence[SampleRequest], *, may_go_on: bool = False
    ) -> AsyncGenerator[tuple[int, SampleChunk]]:
        """Yield the engine's chunks as they arrive, with the index of their request. As `sample`.

        The engine checks its prompts itself (I3).
        """
        with self._admit(requests):
            streams = [stream_request(self.engine, request) for request in requests]
            async with asyncio.timeout(self.limits.request_timeout_s), aclosing(merge_streams(streams)) as chunks:
                async for index, chunk in chunks:
                    _check_version(requests[index], chunk)
                    self._count_ids(len(chunk.completion_ids), chunk.finish_reason, may_go_on=may_go_on)
                    yield index, chunk

    async def score(
        self, sequences: Sequence[RequestPrompt], *, temperature: float, num_top_logprobs: int
    ) -> list[ScoredSequence]:
        """Compute the logprobs of given sequences. Raises as `sample` does."""
        self.check_size(len(sequences), 1)
        self._check_num_top_logprobs(num_top_logprobs)
        engine = require_scoring(self.engine)
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

    def with_engine(self, engine: Engine) -> SamplingService:
        """The same service, with its limits and its queue, over another engine."""
        other = SamplingService(engine, limits=self.limits, metrics=self.metrics)
        other.admission = self.admission
        return other

    @contextmanager
    def _admit(self, requests: Sequence[SampleRequest]) -> Iterator[None]:
        with self.admission.admit(requests):
            self.metrics.prompt_ids.inc(sum(len(request.prompt_ids) for request in requests))
            yield

    def count_end(self, finish_reason: FinishReason) -> None:
        """Count a completion that has ended."""
        if finish_reason is FinishReason.LENGTH:
            self.metrics.events.count(Event.TRUNCATION, finish_reason)
        self.metrics.finished.labels(finish_reason=finish_reason.value).inc()

    def _count_ids(self, number: int, finish_reason: FinishReason | None, *, may_go_on: bool) -> None:
        self.metrics.sampled_ids.inc(number)
        if finish_reason is not None and not (may_go_on and finish_reason is FinishReason.LENGTH):
            self.count_end(finish_reason)


def _check_version(request: SampleRequest, *sampled: SampledSequence | SampleChunk) -> None:
    """Raise `UnknownPolicyError` if another version of the weights sampled than the only one that may."""
    if request.policy_version is None:
        return
    for span in (span for each in sampled for span in each.version_spans):
        if span.policy_version != request.policy_version:
            raise UnknownPolicyError(
                f"the weights have no version {request.policy_version} any more: version {span.policy_version} "
                "answered, whose ids were dropped"
            )


def add_place(error: InvalidInputError, field: str, index: int, number: int) -> InvalidInputError:
    """Put the place of an invalid entry before the error's message, if there are several entries."""
    if number > 1:
        error.args = (f"{field}[{index}]: {error}",)
    return error
