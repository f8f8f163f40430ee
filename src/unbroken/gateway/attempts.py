"""Questions of a session and their answers: readers come and go, a turn is sampled once.

    agent ── request ──► PendingTurn ── engine            the connection breaks, the turn continues
    agent ── retry ────────┘                              reads the same chunks from the first on
    agent ── retry ──► RecordedAnswer                     the turn is on disk, and is not sampled again

The last chunk of a completion is handed out when the turn is on disk.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from unbroken.gateway.state import RecordedTurn
from unbroken.ledger.forest import BrokenReply
from unbroken.messages import Message
from unbroken.rendering.base import Renderer
from unbroken.server.http.errors import HttpError
from unbroken.server.http.idempotency import refuse_reused_key
from unbroken.server.questions import InsistingService, TurnService
from unbroken.server.turns import RetryHint
from unbroken.server.wire.reply import ReplyReader, WholeReply
from unbroken.types import FinishReason, SampleChunk, SampledSequence, SampleRequest, SampleResult

ReadReply = Callable[[int, SampledSequence], Awaitable[WholeReply]]
"""Reads completion number k."""
Record = Callable[[int, SampledSequence, WholeReply], Coroutine[Any, Any, None]]
"""Records completion number k; returns when it is on disk."""
KeepStreamed = Callable[[str, str], Awaitable[None]]
"""Stores more of what is streamed of the first completion, its content and its reasoning."""


class PendingTurn:
    """A turn while it is sampled, whoever reads it: an `OpenTurn` of the server."""

    def __init__(
        self,
        service: TurnService,
        request: SampleRequest,
        renderer: Renderer,
        *,
        answer_id: str,
        read_reply: ReadReply,
        record: Record,
        on_start: Callable[[], None],
        history: bytes,
        keep_streamed: KeepStreamed,
        counts: bool,
    ) -> None:
        """`on_start` is called when the work begins; `history` is that of `BrokenReply`.

        `counts` keeps `num_unrecorded` also for whole answers.
        """
        self.request = request
        self.renderer = renderer
        self.answer_id = answer_id
        self.is_recorded = True
        self.replies: dict[int, WholeReply] = {}
        self._sequences: dict[int, SampledSequence] = {}
        self._service = service
        self._read_reply = read_reply
        self._record = record
        self._on_start = on_start
        self._keep_streamed = keep_streamed
        self._keeping = asyncio.Lock()
        self._history = history
        self._content = self._reasoning = ""
        """What is kept of the first completion; a reader has no more."""
        self._counts = counts
        self._is_recording = False
        self._num_sampled: Counter[int] = Counter()
        """Ids of each completion that is not recorded."""
        self._chunks: list[SampleChunk] = []
        self._work: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether it was sampled and recorded, or failed, or is being cancelled: no further request can join it."""
        return self._work is not None and (self._work.done() or self._work.cancelling() > 0)

    @property
    def num_unrecorded(self) -> int:
        """Number of ids that were sampled for completions which are not recorded."""
        left_out = self._service.num_left_out if isinstance(self._service, InsistingService) else 0
        return self._num_sampled.total() + left_out

    @property
    def streamed(self) -> BrokenReply | None:
        """What readers had of the first completion; None if that is nothing."""
        if not (self._content or self._reasoning):
            return None
        message: Message = {"role": "assistant", "content": self._content, "reasoning_content": self._reasoning}
        return BrokenReply(history=self._history, message=message)

    async def keep_streamed(self, index: int, reply: ReplyReader) -> None:
        """Return when what a reader has of a completion is stored. Of several, agents send back the first.

        Raises:
            StoreError: it was not.
        """
        if index > 0:
            return
        async with self._keeping:  # another reader may have had more of it
            content, reasoning = reply.content, reply.reasoning
            more = content[len(self._content) :], reasoning[len(self._reasoning) :]
            if any(more):
                await self._keep_streamed(*more)
                self._content += more[0]
                self._reasoning += more[1]

    async def sample(self) -> SampleResult:
        """Sample the whole reply."""
        if self._work is None:
            work = self._sample_streamed() if self._counts else self._sample_whole()
            self._follow(asyncio.create_task(work))
        async with aclosing(self._read()) as chunks:
            async for _ in chunks:
                pass
        return SampleResult(
            prompt_ids=self.request.prompt_ids,
            sequences=tuple(self._sequences[index] for index in range(self.request.n)),
            image_sha256s=self.request.image_sha256s,
        )

    async def stream(self) -> AsyncGenerator[SampleChunk]:
        """Yield the reply as it is sampled."""
        if self._work is None:
            self._follow(asyncio.create_task(self._sample_streamed()))
        async with aclosing(self._read()) as chunks:
            async for chunk in chunks:
                yield chunk

    async def finish(self) -> None:
        """Wait until the work has ended, in any way, if it was begun."""
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

    def _follow(self, work: asyncio.Task[None]) -> None:
        self._work = work
        work.add_done_callback(self._end)
        self._on_start()

    def _end(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled():
            work.exception()  # readers raise it; without readers, nobody does
        self._news.set()

    async def _sample_whole(self) -> None:
        (result,) = await self._service.sample([self.request])
        for index, sequence in enumerate(result.sequences):
            _check_complete(sequence.finish_reason)
            await self._end_completion(SampleChunk.from_sequence(index, sequence), sequence)

    async def _sample_streamed(self) -> None:
        parts: list[list[SampleChunk]] = [[] for _ in range(self.request.n)]
        async with aclosing(self._service.stream([self.request])) as chunks:
            async for _, chunk in chunks:
                parts[chunk.index].append(chunk)
                self._num_sampled[chunk.index] += chunk.num_sampled
                if chunk.finish_reason is None:
                    self._add(chunk)
                    continue
                _check_complete(chunk.finish_reason)
                await self._end_completion(chunk, SampleChunk.join(parts[chunk.index], params=self.request.params))

    async def _end_completion(self, last: SampleChunk, sequence: SampledSequence) -> None:
        """Record a completion, and hand out its last chunk."""
        self._is_recording = True
        number = self._num_sampled.pop(last.index, 0)
        try:
            reply = await self._read_reply(last.index, sequence)
            # An abort in between changes nothing: what is written is applied.
            await asyncio.shield(asyncio.create_task(self._record(last.index, sequence, reply)))
            self.replies[last.index] = reply
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
        """All chunks from the first on, then the error of the work, if it failed. Those that are there come as one."""
        work = self._work
        assert work is not None
        position = 0
        while True:
            while position == len(self._chunks) and not work.done():
                self._news.clear()
                await self._news.wait()
            waiting = self._chunks[position:]
            if not waiting:
                break
            position += len(waiting)
            for index in dict.fromkeys(chunk.index for chunk in waiting):
                chunks = [chunk for chunk in waiting if chunk.index == index]
                yield chunks[0] if len(chunks) == 1 else SampleChunk.merge(chunks)
        if work.cancelled():
            raise HttpError(503, "the turn was aborted: ask again", code="aborted", headers={"Retry-After": "1"})
        work.result()


def _check_complete(reason: FinishReason) -> None:
    if reason is FinishReason.ABORT:
        raise HttpError(503, "the engine aborted the turn: ask again", code="aborted", headers={"Retry-After": "1"})


@dataclass(slots=True, eq=False)
class Attempt:
    """One question and its answer, as far as there is one."""

    retry: RetryHint
    n: int
    pending: PendingTurn | None = None
    """The turn while it is sampled; afterwards only if it has more than is recorded."""
    numbers: list[int] = field(default_factory=list)
    """The recorded turns, in the order in which they ended."""
    num_requests: int = 0
    """Requests that are being answered with it."""
    is_delivered: bool = False
    """Whether one of them was answered to the end."""

    @property
    def can_answer(self) -> bool:
        """Whether there is an answer, or will be one."""
        return len(self.numbers) == self.n or (self.pending is not None and not self.pending.is_over)

    def can_answer_retry(self, retry: RetryHint, n: int) -> bool:
        """Whether it has, or will have, an answer to a retry that has its body."""
        return self.can_answer and self.n == n and self.retry.idempotency_key == retry.idempotency_key

    @property
    def was_left(self) -> bool:
        """Whether all readers of its answer went away before its end."""
        return not self.is_delivered and self.num_requests == 0

    def enter(self) -> Callable[[bool], None]:
        """Count a request that is answered with it; returns what to call at its end, with whether it was answered."""
        self.num_requests += 1

        def leave(is_delivered: bool) -> None:
            self.num_requests -= 1
            self.is_delivered = self.is_delivered or is_delivered

        return leave


class Attempts:
    """The attempts of a session."""

    def __init__(self) -> None:
        self._by_body: dict[str, list[Attempt]] = {}
        """By the digest of the request."""
        self._by_key: dict[str, Attempt] = {}
        """By the idempotency key; the newest."""

    def add(self, attempt: Attempt) -> None:
        """Remember an attempt, whose work begins now or has ended."""
        self._by_body.setdefault(attempt.retry.body_sha256, []).append(attempt)
        if attempt.retry.idempotency_key is not None:
            self._by_key[attempt.retry.idempotency_key] = attempt

    def add_recorded(self, turns: Sequence[RecordedTurn]) -> None:
        """Remember turns from the store; nobody knows whether their answers arrived."""
        by_answer: dict[str, list[RecordedTurn]] = {}
        for recorded in turns:
            by_answer.setdefault(recorded.record.answer_id, []).append(recorded)
        for choices in by_answer.values():
            first = choices[0].record
            retry = RetryHint(body_sha256=first.request_digest.hex(), idempotency_key=first.idempotency_key)
            self.add(Attempt(retry, len(choices), numbers=[recorded.record.number for recorded in choices]))

    def end(self, attempt: Attempt) -> None:
        """Forget what nobody needs of an attempt whose work has ended: a session would hold every prompt twice."""
        assert attempt.pending is not None
        if not attempt.can_answer:
            self._by_body[attempt.retry.body_sha256].remove(attempt)
            key = attempt.retry.idempotency_key
            if key is not None and self._by_key.get(key) is attempt:
                del self._by_key[key]
        elif attempt.pending.request.params.num_top_logprobs == 0:  # these are not recorded
            attempt.pending = None

    def find(self, retry: RetryHint, *, n: int) -> Attempt | None:
        """The attempt that a retry asks for; None for a new question.

        A key says which one. Without a key, the same body is a retry if all readers of its answer went away before its
        end, or if it says so (the retry count of an SDK). Else it is a further sample: a vote asks five times at once.

        Raises:
            HttpError: the key came with another body.
        """
        self._check_key(retry)
        attempts = [each for each in self._by_body.get(retry.body_sha256, ()) if each.can_answer_retry(retry, n)]
        # Of equal requests, the one whose reader went away is the one that is asked again.
        left = [attempt for attempt in attempts if attempt.was_left]
        says_so = retry.idempotency_key is not None or bool(retry.retry_count)
        found = left or (attempts if says_so else [])
        return found[-1] if found else None

    def _check_key(self, retry: RetryHint) -> None:
        """Raise `HttpError` for a key that came with another body."""
        keyed = None if retry.idempotency_key is None else self._by_key.get(retry.idempotency_key)
        if keyed is not None and keyed.retry.body_sha256 != retry.body_sha256:
            raise refuse_reused_key()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """A turn that is recorded, for an agent that asks for it again: an `OpenTurn` of the server."""

    answer_id: str
    renderer: Renderer
    request: SampleRequest
    sequences: tuple[SampledSequence, ...]
    is_recorded: bool = True
    replies: Mapping[int, WholeReply] = field(default_factory=dict)

    async def sample(self) -> SampleResult:
        """Sample the whole reply."""
        return SampleResult(
            prompt_ids=self.request.prompt_ids, sequences=self.sequences, image_sha256s=self.request.image_sha256s
        )

    async def stream(self) -> AsyncGenerator[SampleChunk]:
        """Yield the reply as it is sampled."""
        for index, sequence in enumerate(self.sequences):
            yield SampleChunk.from_sequence(index, sequence)

    async def keep_streamed(self, index: int, reply: ReplyReader) -> None:
        """All of it is on disk."""
