"""Which request is a retry, and what it gets: the answer that an earlier one had, or is still being given."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from unbroken.gateway.pending import PendingTurn, to_chunk
from unbroken.gateway.recording import RecordedTurn
from unbroken.rendering.base import Renderer
from unbroken.server.turns import RetryHint
from unbroken.server.wire.reply import WholeReply
from unbroken.types import SampleChunk, SampledSequence, SampleRequest, SampleResult


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

    def add(self, attempt: Attempt) -> None:
        """Remember an attempt whose work begins now."""
        self._by_body.setdefault(attempt.retry.body_sha256, []).append(attempt)

    def add_recorded(self, turns: Sequence[RecordedTurn]) -> None:
        """Remember turns from the store; nobody knows whether their answers arrived."""
        by_answer: dict[str, list[RecordedTurn]] = {}
        for recorded in turns:
            by_answer.setdefault(recorded.answer_id, []).append(recorded)
        for choices in by_answer.values():
            retry = RetryHint(body_sha256=choices[0].body_sha256, idempotency_key=choices[0].idempotency_key)
            attempt = Attempt(retry, len(choices), numbers=[recorded.number for recorded in choices])
            self._by_body.setdefault(retry.body_sha256, []).append(attempt)

    def end(self, attempt: Attempt) -> None:
        """Forget what nobody needs of an attempt whose work has ended: a session would hold every prompt twice."""
        assert attempt.pending is not None
        if not attempt.can_answer:
            self._by_body[attempt.retry.body_sha256].remove(attempt)
        elif attempt.pending.request.params.num_top_logprobs == 0:  # these are not recorded
            attempt.pending = None

    def find(self, retry: RetryHint, *, n: int) -> Attempt | None:
        """The attempt that a retry asks for; None for a new question.

        A retry says so (an idempotency key, the retry count of an SDK), or has the same body as a request whose answer
        was not delivered. The same body beside a request that is being answered is a sibling if it comes from an SDK
        that counts its retries: it would have said so.
        """
        for attempt in reversed(self._by_body.get(retry.body_sha256, [])):
            if not attempt.can_answer or attempt.n != n:
                continue
            has_key = retry.idempotency_key is not None and retry.idempotency_key == attempt.retry.idempotency_key
            if has_key or retry.retry_count:
                return attempt
            if not attempt.is_delivered and (attempt.num_requests == 0 or retry.retry_count is None):
                return attempt
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """A turn that is recorded, for whoever asks for it again. See `OpenTurn`."""

    answer_id: str
    renderer: Renderer
    request: SampleRequest
    sequences: tuple[SampledSequence, ...]
    replies: Mapping[int, WholeReply] = field(default_factory=dict)

    async def sample(self) -> SampleResult:
        """See `OpenTurn`."""
        return SampleResult(
            prompt_ids=self.request.prompt_ids,
            sequences=self.sequences,
            image_sha256s=self.request.image_sha256s,
        )

    async def stream(self) -> AsyncGenerator[SampleChunk]:
        """See `OpenTurn`."""
        for index, sequence in enumerate(self.sequences):
            yield to_chunk(index, sequence)
