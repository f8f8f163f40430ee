"""One question of a session while it is sampled: readers come and go, the turn is sampled once.

    agent ── request ──► PendingTurn ── engine            the connection breaks, the turn goes on
    agent ── retry ────────┘                              reads the same chunks from the first on

The last chunk of a completion is handed out when the turn is on disk.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from unbroken.rendering.base import Renderer
from unbroken.server.http.errors import HttpError
from unbroken.server.service import SamplingService
from unbroken.server.wire.reply import WholeReply
from unbroken.types import FinishReason, SampleChunk, SampledSequence, SampleRequest, SampleResult

Record = Callable[[int, SampledSequence], Awaitable[WholeReply]]
"""Reads and records completion number k; returns when it is on disk."""


class PendingTurn:
    """See the module. An `OpenTurn` of the server."""

    def __init__(
        self,
        service: SamplingService,
        request: SampleRequest,
        renderer: Renderer,
        *,
        answer_id: str,
        record: Record,
        on_start: Callable[[PendingTurn], None],
        counts: bool,
    ) -> None:
        """`on_start` is called when the work begins; `counts` keeps `num_unrecorded` also for whole answers."""
        self.request = request
        self.renderer = renderer
        self.answer_id = answer_id
        self.replies: dict[int, WholeReply] = {}
        self._sequences: dict[int, SampledSequence] = {}
        self._service = service
        self._record = record
        self._on_start = on_start
        self._counts = counts
        self._is_recording = False
        self._num_sampled: Counter[int] = Counter()
        """Ids of each completion that is not recorded."""
        self._chunks: list[SampleChunk] = []
        self._work: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether it was sampled and recorded, or failed, or is being cancelled: nobody can read it any more."""
        return self._work is not None and (self._work.done() or self._work.cancelling() > 0)

    @property
    def num_unrecorded(self) -> int:
        """Number of ids that were sampled for completions which are not recorded."""
        return self._num_sampled.total()

    async def sample(self) -> SampleResult:
        """See `OpenTurn`."""
        self._start(self._sample_streamed if self._counts else self._sample_whole)
        async with aclosing(self._read()) as chunks:
            async for _ in chunks:
                pass
        return SampleResult(
            prompt_ids=self.request.prompt_ids,
            sequences=tuple(self._sequences[index] for index in range(self.request.n)),
            image_sha256s=self.request.image_sha256s,
        )

    async def stream(self) -> AsyncGenerator[SampleChunk]:
        """See `OpenTurn`."""
        self._start(self._sample_streamed)
        async with aclosing(self._read()) as chunks:
            async for chunk in chunks:
                yield chunk

    async def finish(self) -> None:
        """Wait until the work has ended, if it was begun, in whatever way."""
        if self._work is not None:
            await asyncio.wait([self._work])

    def cancel(self) -> None:
        """End the work."""
        if self._work is not None:
            self._work.cancel()

    def abort(self) -> None:
        """End the work, as nobody reads it; a completion that is being recorded is finished, for a retry."""
        if not self._is_recording:
            self.cancel()

    def add_done_callback(self, call: Callable[[], None]) -> None:
        """Call when the work has ended; it must have begun."""
        assert self._work is not None
        self._work.add_done_callback(lambda _: call())

    def _start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._work is None:
            self._work = asyncio.create_task(work())
            self._work.add_done_callback(self._end)
            self._on_start(self)

    def _end(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled():
            work.exception()  # readers raise it; without readers, nobody does
        self._news.set()

    async def _sample_whole(self) -> None:
        (result,) = await self._service.sample([self.request])
        for index, sequence in enumerate(result.sequences):
            _check_complete(sequence.finish_reason)
            await self._end_completion(to_chunk(index, sequence), sequence)

    async def _sample_streamed(self) -> None:
        parts: list[list[SampleChunk]] = [[] for _ in range(self.request.n)]
        temperature = self.request.params.temperature or 1.0
        async with aclosing(self._service.stream([self.request])) as chunks:
            async for _, chunk in chunks:
                parts[chunk.index].append(chunk)
                self._num_sampled[chunk.index] += len(chunk.completion_ids)
                if chunk.finish_reason is None:
                    self._add(chunk)
                    continue
                _check_complete(chunk.finish_reason)
                await self._end_completion(chunk, SampleChunk.join(parts[chunk.index], temperature=temperature))

    async def _end_completion(self, last: SampleChunk, sequence: SampledSequence) -> None:
        """Record a completion, and hand out its last chunk."""
        self._is_recording = True
        number = self._num_sampled.pop(last.index, 0)
        try:
            self.replies[last.index] = await self._record(last.index, sequence)
        except Exception:
            self._num_sampled[last.index] = number
            raise
        self._is_recording = False
        self._sequences[last.index] = sequence
        self._add(last)

    def _add(self, chunk: SampleChunk) -> None:
        self._chunks.append(chunk)
        self._news.set()

    async def _read(self) -> AsyncGenerator[SampleChunk]:
        """All chunks from the first on, then the error of the work, if it failed."""
        work = self._work
        assert work is not None
        for position in range(2**62):
            while position == len(self._chunks) and not work.done():
                self._news.clear()
                await self._news.wait()
            if position == len(self._chunks):
                break
            yield self._chunks[position]
        if work.cancelled():
            raise HttpError(503, "the turn was aborted: ask again", code="aborted", headers={"Retry-After": "1"})
        work.result()


def to_chunk(index: int, sequence: SampledSequence) -> SampleChunk:
    """A whole completion as one chunk."""
    return SampleChunk(
        index=index,
        completion_ids=sequence.completion_ids,
        rollout_logprobs=sequence.rollout_logprobs,
        top_logprobs=sequence.top_logprobs,
        finish_reason=sequence.finish_reason,
        version_spans=sequence.version_spans,
    )


def _check_complete(reason: FinishReason) -> None:
    if reason is FinishReason.ABORT:
        raise HttpError(503, "the engine aborted the turn: ask again", code="aborted", headers={"Retry-After": "1"})
