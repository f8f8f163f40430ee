"""A fake engine for tests: its completions are scripted, and it checks the prompts it gets.

    engine = ScriptedEngine([[5, 6, 2], [7, 2]])              # the first request gets 5 6 2, the second 7 2
    engine = ScriptedEngine(lambda prompt_ids: [len(prompt_ids), 2])

It samples one id per turn of the event loop, so that a request can be paused, aborted, cancelled, or get new weights in
mid-sequence, as with a real engine. It needs no torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np

from unbroken.engines.checks import (
    check_awake,
    check_can_finish,
    check_kept_ids,
    check_not_paused,
    check_request,
    check_routing,
    check_scorable,
    check_source,
    check_unused,
)
from unbroken.errors import EngineError, InvariantError, SamplingError
from unbroken.types import (
    FinishReason,
    ImageSpan,
    InFlight,
    KeptIds,
    Logprobs,
    RoutedExperts,
    SampleChunk,
    SampledSequence,
    SampleRequest,
    SampleResult,
    ScoredSequence,
    TokenIds,
    TopLogprobs,
    VersionSpan,
    WeightPlacement,
    WeightReceipt,
    token_ids,
)
from unbroken.weights.files import FileSource
from unbroken.weights.memory import MemorySource
from unbroken.weights.receiver import WeightReceiver, WireSource, make_local_call
from unbroken.weights.sources import NamedTensors, SharedSource, TensorSource, WeightSource, check_version_rises


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    """One completion. Like a real one it is cut after a stop id of the request, at `max_tokens`, and by the context."""

    completion_ids: TokenIds
    rollout_logprobs: Logprobs | None = None
    """[C]; None gives every id the engine's `logprob`."""
    finish_reason: FinishReason = FinishReason.STOP
    """Why the reply ends where the script ends it; STOP without a stop id means a stop string."""
    routed_experts: RoutedExperts | None = None
    kept_ids: KeptIds | None = None
    """[P + C - 1, L, K] of the prompt and the reply, for requests that want them; cut with the reply."""
    queue_s: float | None = None
    """What the engine reports as the time in its queue."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "completion_ids", token_ids(self.completion_ids, name="completion_ids"))
        if self.rollout_logprobs is not None and len(self.rollout_logprobs) != len(self.completion_ids):
            raise InvariantError(
                f"rollout_logprobs has {len(self.rollout_logprobs)} entries for {len(self.completion_ids)} "
                "completion_ids: one each is needed"
            )


Reply: TypeAlias = ScriptedReply | Sequence[int]
Script: TypeAlias = Sequence[Reply] | Callable[[TokenIds], Reply]
"""Replies in the order of the requests (n of them for a request with n), or a function of the prompt's ids."""


class _ScriptReader:
    """Reads a script, reply by reply."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._num_replies = 0

    def next_reply(self, request: SampleRequest) -> ScriptedReply:
        """Get the reply to a request; raises `EngineError` if none is left."""
        if callable(self._script):
            reply = self._script(request.prompt_ids)
        elif self._num_replies < len(self._script):
            reply = self._script[self._num_replies]
        else:
            raise EngineError(f"the script has {len(self._script)} replies, {request.request_id!r} asks for another")
        self._num_replies += 1
        return reply if isinstance(reply, ScriptedReply) else ScriptedReply(completion_ids=token_ids(reply))


class Histories:
    """The ids of each conversation so far, by the part of the request ids before the last slash."""

    def __init__(self, *, allow_forks: bool) -> None:
        self.forks: list[str] = []
        """The request ids whose prompts left their conversation's history."""
        self._allow_forks = allow_forks
        self._histories: dict[str, list[TokenIds]] = {}

    def check(self, request: SampleRequest) -> None:
        """Raise `InvariantError` for a prompt that leaves its conversation's history, or list it in `forks`."""
        conversation, slash, _ = request.request_id.rpartition("/")
        if not slash or conversation not in self._histories:
            return
        histories = self._histories[conversation]
        if any(np.array_equal(request.prompt_ids[: len(history)], history) for history in histories):
            return
        if not self._allow_forks:
            raise InvariantError(
                f"I1: the prompt of {request.request_id!r} ({len(request.prompt_ids)} ids) does not begin with the "
                f"prompt and completion before it ({len(histories[0])} ids): extend them, or build the engine with "
                "allow_forks=True if the fork is meant"
            )
        self.forks.append(request.request_id)

    def add(self, request: SampleRequest, sequences: Sequence[SampledSequence]) -> None:
        """Keep the prefixes that the conversation's next prompt may have; aborted completions are left out."""
        conversation, slash, _ = request.request_id.rpartition("/")
        finished = [s for s in sequences if s.finish_reason is not FinishReason.ABORT]
        if slash and finished:
            self._histories[conversation] = [
                np.concatenate([request.prompt_ids, sequence.completion_ids]) for sequence in finished
            ]


@dataclass(slots=True)
class _RunningRequest:
    aborted: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine:
    """An `Engine` without a model.

    It refuses with `InvariantError` a prompt that breaks I1: of two requests `<conversation>/<turn>`, the later must
    begin with the prompt and a completion of the earlier, id for id. Request ids without a slash are not compared, nor
    are aborted completions. With `allow_forks` such a prompt is answered and listed in `forks`.

    `echo` returns the prompt to report in place of the true one, to test a caller's echo check (I3). `logprob` is that
    of every id whose reply has none. With `takes_structured_output` the script itself follows what a request demands.
    """

    takes_images = True
    world_size = 1
    weight_sources = (TensorSource, FileSource, MemorySource, WireSource)

    def __init__(
        self,
        script: Script,
        *,
        context_length: int = 32768,
        vocab_size: int = 2**31,
        allow_forks: bool = False,
        echo: Callable[[TokenIds], TokenIds] | None = None,
        logprob: float = -0.5,
        takes_structured_output: bool = False,
    ) -> None:
        self.requests: list[SampleRequest] = []
        """Every request that was accepted, in order."""
        self.loaded_names: list[str] = []
        """The names of the last weights."""
        self.num_sampled = 0
        self._script = _ScriptReader(script)
        self.context_length = context_length
        self.vocab_size = vocab_size
        self._histories = Histories(allow_forks=allow_forks)
        self._echo = echo
        self._logprob = logprob
        self.takes_structured_output = takes_structured_output
        self._policy_version = 0
        self._paused = False
        self._asleep = False
        self._closed = False
        self._running: dict[str, _RunningRequest] = {}
        self._finishing = False
        self.transfer = WeightReceiver(
            self.update_weights,
            make_local_call(lambda: "cpu"),
            policy_version=lambda: self._policy_version,
            check_takes=self._check_open,
            check_weights=_take_any,
            num_workers=1,
        )

    @property
    def forks(self) -> Sequence[str]:
        """The request ids whose prompts left their conversation's history."""
        return self._histories.forks

    @property
    def policy_version(self) -> int:
        """The version of the weights in use; 0 before the first update (I6)."""
        return self._policy_version

    async def weight_placement(self) -> WeightPlacement:
        """Every dtype is taken as it comes."""
        return WeightPlacement(dtype=None, device="cpu")

    async def check_health(self) -> None:
        """Return at once; raises `EngineError` if the engine is closed or has failed."""
        self._check_open()

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample `request.n` completions.

        `InvariantError` if the prompt breaks I1, `EngineError` if the script has no reply left.
        """
        chunks: list[list[SampleChunk]] = [[] for _ in range(request.n)]
        async with aclosing(self._answer(request)) as answer:
            async for chunk in answer:
                chunks[chunk.index].append(chunk)
        sequences = tuple(SampleChunk.join(own, params=request.params) for own in chunks)
        self._histories.add(request, sequences)
        return self._result(request, sequences)

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        """Yield the completions in chunks as they are sampled; the chunks of the n completions are interleaved.

        The completions come one after the other.
        """
        async with aclosing(self._answer(request)) as answer:
            async for chunk in answer:
                yield chunk
        self._result(request, ()).check_prompt(request)

    async def score(
        self,
        token_ids: TokenIds,
        *,
        images: Sequence[ImageSpan] = (),
        temperature: float = 1.0,
        num_top_logprobs: int = 0,
    ) -> ScoredSequence:
        """Return `logprob` for every id, which is the most likely one."""
        self._check_awake()
        check_scorable(
            token_ids, temperature=temperature, vocab_size=self.vocab_size, context_length=self.context_length
        )
        ids = token_ids[1:]
        logprobs = np.full(len(ids), self._logprob, dtype=np.float32)
        return ScoredSequence(logprobs=logprobs, top_logprobs=self._tops(ids, logprobs, num_top_logprobs))

    async def abort(self, request_id: str) -> None:
        """End a request: its call returns what was sampled so far, with ABORT."""
        self._check_open()
        if request_id in self._running:
            self._abort(self._running[request_id])

    async def pause(self) -> None:
        """Stop sampling after the current step; requests wait and keep what they have."""
        self._check_awake()
        self._paused = True

    async def resume(self) -> None:
        """Continue after `pause`."""
        self._check_awake()
        self._paused = False
        for running in self._running.values():
            running.wake.set()

    async def update_weights(
        self, source: WeightSource, *, policy_version: int, reuse_kv: bool = False, in_flight: InFlight = InFlight.PAUSE
    ) -> WeightReceipt:
        """Take new weights; any names and shapes are taken."""
        check_source(source, self.weight_sources)
        self._check_open()
        check_version_rises(policy_version, current=self._policy_version)
        check_can_finish(in_flight, paused=self._paused)
        began = time.perf_counter()
        weights: list[tuple[str, Any]] = []
        if isinstance(source, TensorSource):  # without a thread, so that no ids are sampled before it ends
            weights = list(source.tensors)
        elif isinstance(source, SharedSource):
            weights = await asyncio.to_thread(lambda: list(source.read("cpu")))
        elif isinstance(source, WireSource):
            await source.wait_for_first()
            async for part in source.parts():
                await source.take(part, weights.extend)
        arrived = time.perf_counter()
        if in_flight is InFlight.FINISH:
            await self._finish_requests()
        policy_version = source.policy_version or policy_version
        check_version_rises(policy_version, current=self._policy_version)
        self._load(weights)
        self._policy_version = policy_version
        if not self._running:  # otherwise it does not sleep yet
            self._asleep = False
        seconds = {"receive": arrived - began, "load": time.perf_counter() - arrived}
        digest = source.digest if isinstance(source, WireSource) else None
        return WeightReceipt(policy_version=policy_version, digest=digest, seconds=seconds)

    async def reset_prefix_cache(self) -> None:
        """Drop the KV of finished requests."""
        self._check_awake()

    @property
    def is_asleep(self) -> bool:
        """Whether the memory was given back."""
        return self._asleep

    async def sleep(self) -> None:
        """Finish the requests in flight, then give back the memory of weights, keys and values."""
        self._check_open()
        check_not_paused(self._paused)
        self._asleep = True
        try:
            while self._running:  # noqa: ASYNC110  # it is a turn of the loop that samples an id
                await asyncio.sleep(0)
            self._asleep = True
        except asyncio.CancelledError:
            self._asleep = False
            raise

    async def close(self) -> None:
        """Abort all requests and free the model."""
        self._closed = True
        for running in self._running.values():
            self._abort(running)

    def _load(self, tensors: NamedTensors) -> None:
        self.loaded_names = [name for name, _ in tensors]

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _check_awake(self) -> None:
        self._check_open()
        check_awake(self._asleep)

    async def _finish_requests(self) -> None:
        """Wait until no request runs; new requests wait."""
        self._finishing = True
        try:
            while self._running:  # noqa: ASYNC110  # as above
                await asyncio.sleep(0)
        finally:
            self._finishing = False

    def _abort(self, running: _RunningRequest) -> None:
        running.aborted = True
        running.wake.set()

    def _take_replies(self, request: SampleRequest) -> list[ScriptedReply]:
        """The script's next replies, with no more than the request asks for."""
        replies = [self._script.next_reply(request) for _ in range(request.n)]
        if request.params.return_routed_experts:
            is_recorded = all(reply.routed_experts is not None for reply in replies)
            check_routing(request, is_recorded=is_recorded, option="replies that have them")
        else:
            replies = [replace(reply, routed_experts=None) for reply in replies]
        if request.params.return_kept_ids and request.params.truncates:
            is_recorded = all(reply.kept_ids is not None for reply in replies)
            check_kept_ids(request, is_recorded=is_recorded, needs="replies that have them")
        else:
            replies = [replace(reply, kept_ids=None) for reply in replies]
        return replies

    async def _answer(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        while self._finishing:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0)
        self._check_awake()
        check_request(request, vocab_size=self.vocab_size, context_length=self.context_length)
        if request.params.structured_output is not None and not self.takes_structured_output:
            raise SamplingError(
                f"this engine has no structured output, got structured_output {request.params.structured_output}"
            )
        check_unused(request.request_id, self._running)
        self._histories.check(request)
        replies = self._take_replies(request)
        self.requests.append(request)
        running = self._running[request.request_id] = _RunningRequest()
        try:
            for index, reply in enumerate(replies):
                async with aclosing(self._emit(request, reply, running, index)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        finally:
            del self._running[request.request_id]

    async def _emit(
        self, request: SampleRequest, reply: ScriptedReply, running: _RunningRequest, index: int
    ) -> AsyncGenerator[SampleChunk]:
        """Yield the reply id by id, each with the policy version in use at that moment."""
        limit = min(request.params.max_tokens, self.context_length - len(request.prompt_ids))
        logprobs = reply.rollout_logprobs
        if logprobs is None:
            logprobs = np.full(len(reply.completion_ids), self._logprob, dtype=np.float32)
        versions: list[int] = []
        finish_reason = reply.finish_reason
        for position, token_id in enumerate(reply.completion_ids.tolist()):
            await self._wait_for_turn(running)
            if running.aborted:
                finish_reason = FinishReason.ABORT
                break
            versions.append(self._policy_version)
            self.num_sampled += 1
            own = slice(position, position + 1)
            yield SampleChunk(
                index=index,
                completion_ids=reply.completion_ids[own],
                rollout_logprobs=logprobs[own],
                top_logprobs=self._tops(reply.completion_ids[own], logprobs[own], request.params.num_top_logprobs),
                kept_ids=None if reply.kept_ids is None else reply.kept_ids.pick(np.array([position])),
            )
            if token_id in request.params.stop_token_ids:
                finish_reason = FinishReason.STOP
                break
            if len(versions) == limit:
                finish_reason = FinishReason.LENGTH
                break
        yield SampleChunk(
            index=index,
            completion_ids=token_ids([]),
            rollout_logprobs=logprobs[:0],
            finish_reason=finish_reason,
            version_spans=_spans(versions),
            routed_experts=None
            if reply.routed_experts is None or finish_reason is FinishReason.ABORT
            else reply.routed_experts[: len(request.prompt_ids) + len(versions) - 1],
            queue_s=reply.queue_s,
        )

    async def _wait_for_turn(self, running: _RunningRequest) -> None:
        await asyncio.sleep(0)
        while self._paused and not running.aborted:
            running.wake.clear()
            await running.wake.wait()

    def _tops(self, ids: TokenIds, logprobs: Logprobs, number: int) -> TopLogprobs | None:
        """Make top logprobs in which the id itself is the most likely one, and no other is possible."""
        if not number:
            return None
        others = np.arange(1, number, dtype=np.int32)
        top_ids = np.concatenate([ids[:, None], (ids[:, None] + others) % self.vocab_size], axis=1)
        top_logprobs = np.full(top_ids.shape, -np.inf, dtype=np.float32)
        top_logprobs[:, 0] = logprobs
        return TopLogprobs(token_ids=top_ids, logprobs=top_logprobs)

    def _result(self, request: SampleRequest, sequences: tuple[SampledSequence, ...]) -> SampleResult:
        prompt_ids = request.prompt_ids if self._echo is None else self._echo(request.prompt_ids)
        return SampleResult(prompt_ids=prompt_ids, sequences=sequences, image_sha256s=request.image_sha256s)


def _spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Join the versions of single ids to spans."""
    spans: list[VersionSpan] = []
    for version, run in groupby(versions):
        start = spans[-1].stop if spans else 0
        spans.append(VersionSpan(start=start, stop=start + len(list(run)), policy_version=version))
    return tuple(spans)


async def _take_any(*_: Any, **__: Any) -> None:
    """Any names and shapes are taken."""
