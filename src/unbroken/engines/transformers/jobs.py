"""A request in the embedded engine: one `Job`, with one `Row` for each completion."""

from __future__ import annotations

import time

import numpy as np

from unbroken.engines.transformers.images import ImageFeatures, PromptImages
from unbroken.engines.transformers.worker import Answer, Feed
from unbroken.types import (
    FinishReason,
    KeptIds,
    Logprobs,
    RoutedExperts,
    SampleChunk,
    SampledSequence,
    SampleRequest,
    SampleResult,
    TokenIds,
    TopLogprobs,
    VersionSpan,
    token_ids,
)


class Row:
    """One completion, with its random stream and the policy versions of its parts."""

    def __init__(self, job: Job, index: int, rng: np.random.Generator) -> None:
        self.job = job
        self.index = index
        self.request = job.request
        self.params = job.request.params
        self.rng = rng
        self.prompt_keys = job.prompt_keys
        self.prompt_length = len(self.prompt_keys)
        self._queue_s: float | None = None
        self._versions: list[tuple[int, int]] = []
        self._tops: list[tuple[TokenIds, Logprobs]] = []
        self.controls = self.params.controls
        self.returns_kept_ids = self.params.return_kept_ids and self.params.truncates
        self._kept: list[TokenIds] = []

    def begin(self, policy_version: int) -> None:
        """Note that this completion leaves the queue now, and is sampled with this policy version."""
        self._queue_s = time.perf_counter() - self.job.queued_s
        self.begin_version(0, policy_version)

    def begin_version(self, num_sampled: int, policy_version: int) -> None:
        """Note that ids from completion id `num_sampled` on have this policy version."""
        self._versions.append((num_sampled, policy_version))

    @property
    def is_listening(self) -> bool:
        """Whether `add_sampled` shall be called with each id."""
        return self.returns_kept_ids or self.params.num_top_logprobs > 0 or self.job.feed is not None

    def add_sampled(
        self, token_id: int, logprob: float, top: tuple[TokenIds, Logprobs] | None, kept: TokenIds | None
    ) -> None:
        """Add the id that was just sampled; `top` is [K] and [K], and it was `kept` among these ids, if the request
        asks for them.
        """
        if top is not None:
            self._tops.append(top)
        if kept is not None:
            self._kept.append(kept)
        if self.job.feed is not None:
            chunk = SampleChunk(
                index=self.index,
                completion_ids=token_ids([token_id]),
                rollout_logprobs=np.array([logprob]),
                top_logprobs=None if top is None else TopLogprobs(token_ids=top[0][None], logprobs=top[1][None]),
                kept_ids=None if kept is None else KeptIds.of([kept]),
            )
            self.job.feed.put(chunk)

    def finish(
        self,
        all_ids: TokenIds,
        logprobs: Logprobs,
        finish_reason: FinishReason,
        routed_experts: RoutedExperts | None = None,
    ) -> None:
        """Give the completion to the job; `all_ids` and `logprobs` [T] begin with the prompt's keys as fed."""
        completion_ids = all_ids[self.prompt_length :]
        sequence = SampledSequence(
            completion_ids=completion_ids,
            rollout_logprobs=logprobs[self.prompt_length :],
            top_logprobs=self._top_logprobs(),
            finish_reason=finish_reason,
            version_spans=self._spans(len(completion_ids)),
            temperature=self.params.temperature if self.params.temperature > 0 else 1.0,
            controls=self.controls,
            routed_experts=None if finish_reason is FinishReason.ABORT else routed_experts,
            kept_ids=KeptIds.of(self._kept) if self.returns_kept_ids else None,
            queue_s=self._queue_s,
        )
        self.job.finish_row(self, all_ids[: self.prompt_length], sequence)

    def _top_logprobs(self) -> TopLogprobs | None:
        number = self.params.num_top_logprobs
        if not number:
            return None
        ids, logprobs = zip(*self._tops, strict=True) if self._tops else ((), ())
        return TopLogprobs(
            token_ids=np.array(ids, dtype=np.int32).reshape(-1, number),
            logprobs=np.array(logprobs, dtype=np.float32).reshape(-1, number),
        )

    def _spans(self, num_ids: int) -> tuple[VersionSpan, ...]:
        """Return the versions as spans over [0, num_ids), without empty ones."""
        ends = [start for start, _ in self._versions[1:]] + [num_ids]
        return tuple(
            VersionSpan(start=start, stop=stop, policy_version=version)
            for (start, version), stop in zip(self._versions, ends, strict=False)  # a row that never ran has no version
            if start < stop
        )


class Job:
    """One request, the answer to its caller, and the feed if the caller wants each id when it is sampled."""

    def __init__(
        self,
        request: SampleRequest,
        answer: Answer[SampleResult],
        feed: Feed[SampleChunk | None] | None = None,
        *,
        images: PromptImages | None = None,
    ) -> None:
        self.request = request
        self.adapter = 0
        """Its number (`RowAdapters`), once it is submitted."""
        self.queued_s = time.perf_counter()
        self.features = None if images is None else ImageFeatures(images=images)
        self.stop_ids = frozenset(request.params.stop_token_ids)
        self.prompt_keys = request.prompt_ids if images is None else images.keys
        """[T] compared with other prompts, to reuse their keys and values."""
        self.answer = answer
        self.feed = feed
        streams = np.random.SeedSequence(request.params.seed).spawn(request.n)
        self.rows = [Row(self, index, np.random.default_rng(stream)) for index, stream in enumerate(streams)]
        self._prompt_ids = request.prompt_ids
        self._sequences: dict[Row, SampledSequence] = {}

    @property
    def is_done(self) -> bool:
        """Whether every row has ended."""
        return len(self._sequences) == len(self.rows)

    def finish_row(self, row: Row, prompt_keys: TokenIds, sequence: SampledSequence) -> None:
        """Keep a completion; the last one resolves the answer.

        If this row was fed another prompt (`prompt_keys`), the result reports that, for the caller's check (I3).
        """
        self._sequences[row] = sequence
        if not np.array_equal(prompt_keys, self.prompt_keys):
            self._prompt_ids = token_ids(np.maximum(prompt_keys, 0))
        if self.feed is not None:
            chunk = SampleChunk(
                index=row.index,
                completion_ids=sequence.completion_ids[:0],
                rollout_logprobs=sequence.rollout_logprobs[:0],
                finish_reason=sequence.finish_reason,
                version_spans=sequence.version_spans,
                routed_experts=sequence.routed_experts,
                queue_s=sequence.queue_s,
            )
            self.feed.put(chunk)
        if self.is_done:
            sequences = tuple(self._sequences[row] for row in self.rows)
            result = SampleResult(
                prompt_ids=self._prompt_ids, sequences=sequences, image_sha256s=self.request.image_sha256s
            )
            self.answer.resolve(result)
