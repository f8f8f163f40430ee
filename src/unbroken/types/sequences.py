"""Token sequences: sampled by an engine, scored, an engine's answer as a whole, and rows to train on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import reduce
from operator import and_

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import EchoError, EngineError, InvariantError
from unbroken.types.arrays import BoolMask, Logprobs, TokenIds, count_common_prefix, freeze, token_ids
from unbroken.types.controls import ControlSpan, LogitControls
from unbroken.types.images import ImageSpan, find_misplaced_span
from unbroken.types.recorded import KeptIds, RoutedExperts, routed_experts
from unbroken.types.sampling import SampleRequest, SamplingParams

NO_VERSION = -1
"""The policy version of a token that no engine sampled."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop id was sampled (it is the last completion id) or a stop string appeared."""
    LENGTH = "length"
    """`max_tokens` or the context length was reached."""
    ABORT = "abort"
    """The request was aborted; its partial ids are never trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """The completion ids [start, stop) were sampled with the weights of `policy_version` (I6)."""

    start: int
    stop: int
    policy_version: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InvariantError(f"a version span must satisfy 0 <= start < stop, got [{self.start}, {self.stop})")
        if self.policy_version < 0:
            raise InvariantError(f"policy_version must be >= 0, got {self.policy_version}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The K most likely ids at each position, most likely first, and their logprobs under the same distribution."""

    token_ids: NDArray[np.int32]
    """[C, K]"""
    logprobs: Logprobs
    """[C, K] -inf where the distribution has fewer than K ids."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", freeze(np.asarray(self.token_ids, dtype=np.int32)))
        object.__setattr__(self, "logprobs", freeze(np.asarray(self.logprobs, dtype=np.float32)))
        if self.token_ids.ndim != 2 or self.token_ids.shape != self.logprobs.shape:
            raise InvariantError(
                f"top logprobs need ids and logprobs of the same shape [C, K], got {self.token_ids.shape} and "
                f"{self.logprobs.shape}"
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    @staticmethod
    def empty(number: int) -> TopLogprobs | None:
        """Make [0, number] for a sequence without ids; None if `number` is 0."""
        if not number:
            return None
        return TopLogprobs(
            token_ids=np.zeros((0, number), dtype=np.int32), logprobs=np.zeros((0, number), dtype=np.float32)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSequence:
    """The logprobs of a given sequence of T ids."""

    logprobs: Logprobs
    """[T - 1] logprob of each id after the first, given the ids before it."""
    top_logprobs: TopLogprobs | None = None
    """[T - 1, K] if requested."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "logprobs", freeze(np.asarray(self.logprobs, dtype=np.float32)))
        _check_top_logprobs(self.top_logprobs, len(self.logprobs), "scored ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One completion, exactly as an engine sampled it (I2).

    Every sampled id has one finite logprob and belongs to exactly one version span. A sampled stop id is the last id.

    Ids in no version span were *given* inside the completion, as those that close reasoning which was too long
    (`then`). An engine gives none. Worked example: 3 4 were sampled, 8 9 given, and 5 was sampled after them:

        completion_ids     3     4     8    9    5
        rollout_logprobs  -0.1  -0.2  NaN  NaN  -0.3       version_spans  [0, 2)  [4, 5)
    """

    completion_ids: TokenIds
    """[C] stop id included; empty only for an aborted request."""
    rollout_logprobs: Logprobs
    """[C] under the distribution that the id was sampled from; NaN where it was given."""
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    """Spans in [0, C), in order and without overlap, that cover the sampled ids."""
    temperature: float = 1.0
    """The temperature that the logprobs refer to; 1.0 for greedy sampling."""
    top_logprobs: TopLogprobs | None = None
    """[C, K] if requested."""
    routed_experts: RoutedExperts | None = None
    """[P + C - 1, L, K] if requested, for the P ids of the prompt and the completion without its last id, which the
    model did not compute; None for an aborted request."""
    kept_ids: KeptIds | None = None
    """[C] the ids that each id was sampled from, if requested and the request cuts any (`SamplingParams.truncates`)."""
    controls: LogitControls | None = None
    """What changed the logits (`SamplingParams.controls`); None if nothing did."""
    queue_s: float | None = None
    """Seconds from the engine's acceptance of the request until it began to compute this completion; None if the engine
    does not report it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "completion_ids", token_ids(self.completion_ids, name="completion_ids"))
        object.__setattr__(self, "rollout_logprobs", freeze(np.asarray(self.rollout_logprobs, dtype=np.float32)))
        if self.routed_experts is not None:
            object.__setattr__(self, "routed_experts", routed_experts(self.routed_experts))
        if not isinstance(self.finish_reason, FinishReason):
            raise InvariantError(f"finish_reason must be a FinishReason, got {self.finish_reason!r}")
        num_ids = len(self.completion_ids)
        self._check_versions(num_ids)
        self._check_logprobs(num_ids)
        if num_ids == 0 and self.finish_reason is not FinishReason.ABORT:
            raise InvariantError(f"completion_ids is empty with finish_reason {self.finish_reason.value!r}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise InvariantError(f"temperature must be finite and > 0, got {self.temperature}")
        if self.queue_s is not None and not 0 <= self.queue_s < math.inf:
            raise InvariantError(f"queue_s must be finite and >= 0, or None, got {self.queue_s}")
        _check_top_logprobs(self.top_logprobs, num_ids, "completion_ids")
        _check_kept(self.kept_ids, self.completion_ids, of="completion_ids")

    def _check_logprobs(self, num_ids: int) -> None:
        if self.rollout_logprobs.shape != (num_ids,):
            raise InvariantError(
                f"rollout_logprobs has shape {self.rollout_logprobs.shape} for {num_ids} completion_ids: "
                "the engine must return one logprob per sampled token, stop token included"
            )
        is_finite = np.isfinite(self.rollout_logprobs)
        if self.num_given == 0 and is_finite.all():  # so it is in all that engines return
            return
        wrong = np.flatnonzero(~is_finite & self.sampled_mask)
        if len(wrong):
            raise InvariantError(f"rollout_logprobs[{wrong[0]}] is {self.rollout_logprobs[wrong[0]]}, must be finite")
        wrong = np.flatnonzero(~np.isnan(self.rollout_logprobs) & ~self.sampled_mask)
        if len(wrong):
            raise InvariantError(
                f"version_spans must cover every id with a logprob, and completion_ids[{wrong[0]}] of {num_ids} is in "
                "none: every sampled id needs a version"
            )

    def _check_versions(self, num_ids: int) -> None:
        end = 0
        for span in self.version_spans:
            if not end <= span.start < span.stop <= num_ids:
                raise InvariantError(
                    f"version_spans must be in order and within {num_ids} completion_ids, got [{span.start}, "
                    f"{span.stop}) after {end}"
                )
            end = span.stop

    @staticmethod
    def aborted(params: SamplingParams) -> SampledSequence:
        """The empty completion of a request that was aborted before its first id."""
        return SampledSequence(
            completion_ids=token_ids([]),
            rollout_logprobs=np.zeros(0, dtype=np.float32),
            finish_reason=FinishReason.ABORT,
            version_spans=(),
            temperature=params.temperature or 1.0,
            controls=params.controls,
            top_logprobs=TopLogprobs.empty(params.num_top_logprobs),
        )

    def then(self, given_ids: TokenIds, later: SampledSequence) -> SampledSequence:
        """Join this completion, K ids that were given after it, and the completion that was sampled after both."""
        start = len(self.completion_ids) + len(given_ids)
        if self.top_logprobs is not None or later.top_logprobs is not None:
            raise InvariantError("completions with top_logprobs cannot be joined: a given id has none")
        if self.controls != later.controls:
            raise InvariantError(f"completions to be joined must have the same controls, got {later.controls} second")
        experts = later.routed_experts  # of all ids before too; those known earlier are those it was sampled with
        if experts is not None and self.routed_experts is not None:
            experts = np.concatenate([self.routed_experts, experts[len(self.routed_experts) :]])
        waits = (self.queue_s, later.queue_s)
        return replace(
            later,
            completion_ids=np.concatenate([self.completion_ids, given_ids, later.completion_ids]),
            rollout_logprobs=np.concatenate(
                [self.rollout_logprobs, np.full(len(given_ids), np.nan, np.float32), later.rollout_logprobs]
            ),
            version_spans=(
                *self.version_spans,
                *(replace(each, start=each.start + start, stop=each.stop + start) for each in later.version_spans),
            ),
            routed_experts=experts,
            kept_ids=KeptIds.join(
                [
                    (self.kept_ids, len(self.completion_ids)),
                    (None, len(given_ids)),
                    (later.kept_ids, len(later.completion_ids)),
                ]
            ),
            queue_s=None if waits[0] is None or waits[1] is None else waits[0] + waits[1],
        )

    @property
    def sampled_mask(self) -> BoolMask:
        """[C] true exactly on the ids that an engine sampled."""
        mask: BoolMask = self.policy_versions != NO_VERSION
        return mask

    @property
    def num_sampled(self) -> int:
        """Number of sampled ids."""
        return sum(span.stop - span.start for span in self.version_spans)

    @property
    def num_given(self) -> int:
        """Number of ids that were given between sampled ones, to close reasoning that was too long."""
        return len(self.completion_ids) - self.num_sampled

    @property
    def policy_versions(self) -> NDArray[np.int32]:
        """[C] the policy version of each id; `NO_VERSION` where it was given."""
        out = np.full(len(self.completion_ids), NO_VERSION, dtype=np.int32)
        for span in self.version_spans:
            out[span.start : span.stop] = span.policy_version
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleChunk:
    """The K ids of one completion of a request since its previous chunk. The last chunk has a finish reason."""

    index: int
    """Index of the completion, from 0 to n - 1."""
    completion_ids: TokenIds
    """[K] may be empty in the last chunk."""
    rollout_logprobs: Logprobs
    """[K]"""
    top_logprobs: TopLogprobs | None = None
    kept_ids: KeptIds | None = None
    """[K] if requested, as in `SampledSequence`."""
    finish_reason: FinishReason | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    """Set in the last chunk, for the whole completion."""
    routed_experts: RoutedExperts | None = None
    """Set in the last chunk if requested, as in `SampledSequence`."""
    queue_s: float | None = None
    """Set in the last chunk, as in `SampledSequence`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "completion_ids", token_ids(self.completion_ids, name="completion_ids"))
        object.__setattr__(self, "rollout_logprobs", freeze(np.asarray(self.rollout_logprobs, dtype=np.float32)))
        if len(self.rollout_logprobs) != len(self.completion_ids):
            raise InvariantError(
                f"rollout_logprobs has {len(self.rollout_logprobs)} entries for {len(self.completion_ids)} "
                "completion_ids of a chunk"
            )
        _check_top_logprobs(self.top_logprobs, len(self.completion_ids), "completion_ids of a chunk")
        _check_kept(self.kept_ids, self.completion_ids, of="completion_ids of a chunk")

    @property
    def num_sampled(self) -> int:
        """Number of sampled ids; those that were given have no logprob."""
        return int(np.count_nonzero(~np.isnan(self.rollout_logprobs)))

    @staticmethod
    def aborted(index: int) -> SampleChunk:
        """The last chunk of a completion that was aborted before its first id."""
        return SampleChunk(
            index=index,
            completion_ids=token_ids([]),
            rollout_logprobs=np.zeros(0, dtype=np.float32),
            finish_reason=FinishReason.ABORT,
        )

    @staticmethod
    def from_sequence(index: int, sequence: SampledSequence) -> SampleChunk:
        """A whole completion as one chunk."""
        return SampleChunk(
            index=index,
            completion_ids=sequence.completion_ids,
            rollout_logprobs=sequence.rollout_logprobs,
            top_logprobs=sequence.top_logprobs,
            kept_ids=sequence.kept_ids,
            finish_reason=sequence.finish_reason,
            version_spans=sequence.version_spans,
            routed_experts=sequence.routed_experts,
            queue_s=sequence.queue_s,
        )

    @staticmethod
    def merge(chunks: Sequence[SampleChunk]) -> SampleChunk:
        """Make one chunk of several of a completion that follow each other."""
        tops = [chunk.top_logprobs for chunk in chunks if chunk.top_logprobs is not None and len(chunk.top_logprobs)]
        return replace(
            chunks[-1],
            completion_ids=np.concatenate([chunk.completion_ids for chunk in chunks]),
            rollout_logprobs=np.concatenate([chunk.rollout_logprobs for chunk in chunks]),
            kept_ids=KeptIds.join([(chunk.kept_ids, len(chunk.completion_ids)) for chunk in chunks]),
            top_logprobs=TopLogprobs(
                token_ids=np.concatenate([top.token_ids for top in tops]),
                logprobs=np.concatenate([top.logprobs for top in tops]),
            )
            if tops
            else None,
        )

    @staticmethod
    def join(chunks: Sequence[SampleChunk], *, params: SamplingParams) -> SampledSequence:
        """Join all chunks of a completion that was sampled so, in order."""
        whole = SampleChunk.merge(chunks)
        if whole.finish_reason is None:
            raise InvariantError("the last chunk of a completion must have a finish reason")
        return SampledSequence(
            completion_ids=whole.completion_ids,
            rollout_logprobs=whole.rollout_logprobs,
            finish_reason=whole.finish_reason,
            version_spans=whole.version_spans,
            temperature=params.temperature or 1.0,
            controls=params.controls,
            routed_experts=whole.routed_experts,
            kept_ids=whole.kept_ids,
            queue_s=whole.queue_s,
            top_logprobs=whole.top_logprobs,
        )


def _check_top_logprobs(tops: TopLogprobs | None, num_ids: int, what: str) -> None:
    if tops is not None and len(tops) != num_ids:
        raise InvariantError(f"top_logprobs has {len(tops)} positions for {num_ids} {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """An engine's answer: the completions of a request, with the prompt that the engine reports it used."""

    prompt_ids: TokenIds
    """[T] as the engine reports it, to compare with the prompt sent (I3)."""
    sequences: tuple[SampledSequence, ...]
    image_sha256s: tuple[str, ...] = ()
    """SHA-256 of each image that the model saw, in order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", token_ids(self.prompt_ids, name="prompt_ids"))
        for index, sequence in enumerate(self.sequences):
            num_computed = len(self.prompt_ids) + len(sequence.completion_ids) - 1
            if sequence.routed_experts is not None and len(sequence.routed_experts) != num_computed:
                raise InvariantError(
                    f"routed_experts of sequences[{index}] has {len(sequence.routed_experts)} entries for "
                    f"{len(self.prompt_ids)} prompt_ids and {len(sequence.completion_ids)} completion_ids: every id "
                    "but the last needs one"
                )

    def check_answers(self, request: SampleRequest) -> None:
        """Raise `EchoError` if the prompt or the number of completions differs from `request` (I3), and `EngineError`
        if a completion lacks the ids that it was sampled from.
        """
        self.check_prompt(request)
        if len(self.sequences) != request.n:
            raise EchoError(f"asked for n={request.n} completions, got {len(self.sequences)} ({request.request_id})")
        for sequence in self.sequences:
            if sequence.num_given > 0:
                raise EngineError(
                    f"the engine reports the versions of {sequence.num_sampled} of {len(sequence.completion_ids)} "
                    f"completion_ids: every id that it sampled needs one ({request.request_id})"
                )
        if request.params.return_kept_ids and request.params.truncates:
            for sequence in self.sequences:
                if sequence.kept_ids is None and sequence.finish_reason is not FinishReason.ABORT:
                    raise EngineError(
                        f"the engine does not say which ids it sampled from: sampling.{request.params.truncations} "
                        f"cannot be combined with return_kept_ids there ({request.request_id})"
                    )

    def check_prompt(self, request: SampleRequest) -> None:
        """Raise `EchoError` if the prompt or its images differ from `request` (I3)."""
        asked = request.image_sha256s
        if self.image_sha256s != asked:
            raise EchoError(
                f"the engine reports the images {[name[:12] for name in self.image_sha256s]}, but it was sent "
                f"{[name[:12] for name in asked]} (request {request.request_id})"
            )
        if self.prompt_ids is not request.prompt_ids and not np.array_equal(self.prompt_ids, request.prompt_ids):
            where = count_common_prefix(self.prompt_ids, request.prompt_ids)
            raise EchoError(
                f"the engine reports a prompt of {len(self.prompt_ids)} ids that differs from the "
                f"{len(request.prompt_ids)} it was sent, first at position {where} (request {request.request_id})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One flat row to train on: a sequence of T ids with all that is known about them; all arrays are [T].

    `sampled_mask` is a fact, `loss_mask` a choice: the loss covers only sampled ids, but not always all of them. An id
    shared by two branches is trained in only one of them.
    """

    token_ids: TokenIds
    sampled_mask: BoolMask
    """True exactly on the ids that an engine sampled."""
    loss_mask: BoolMask
    rollout_logprobs: Logprobs
    """The sampler's logprobs; NaN where `sampled_mask` is false."""
    policy_versions: NDArray[np.int32]
    """The versions that sampled the ids; `NO_VERSION` where `sampled_mask` is false."""
    advantages: NDArray[np.float32]
    """Zero where `loss_mask` is false."""
    temperature: float = 1.0
    """The temperature that all `rollout_logprobs` refer to."""
    images: tuple[ImageSpan, ...] = ()
    """In order and without overlap, none with sampled ids, and all within the row."""
    routed_experts: RoutedExperts | None = None
    """[R, L, K] the experts that computed the first R <= T ids when they were sampled; None if none are known."""
    kept_ids: KeptIds | None = None
    """[T] the ids that each id was sampled from, the whole vocabulary for given ones; None if nothing was cut."""
    controls: tuple[ControlSpan, ...] = ()
    """What changed the logits of sampled ids, for each completion where anything did: in order and without overlap."""
    policy: str | None = None
    """The policy that sampled it, of a run of several; None otherwise."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", token_ids(self.token_ids))
        if self.routed_experts is not None:
            object.__setattr__(self, "routed_experts", routed_experts(self.routed_experts))
            if len(self.routed_experts) > len(self.token_ids):
                raise InvariantError(
                    f"routed_experts has {len(self.routed_experts)} entries for {len(self.token_ids)} token_ids: at "
                    "most one each"
                )
        for name, dtype in _ROW_DTYPES:
            object.__setattr__(self, name, freeze(np.asarray(getattr(self, name), dtype=dtype)))
            if getattr(self, name).shape != self.token_ids.shape:
                raise InvariantError(
                    f"{name} has shape {getattr(self, name).shape} for {len(self.token_ids)} token_ids: they must agree"
                )
        self._check_masks()
        _check_kept(self.kept_ids, self.token_ids, of="token_ids")
        if self.kept_ids is not None and self.kept_ids.sizes[~self.sampled_mask].any():
            raise InvariantError("only sampled ids have kept_ids, and a given one has some")
        self._check_controls()
        self._check_images()

    def _check_masks(self) -> None:
        checks = (
            (np.isfinite(self.rollout_logprobs) == self.sampled_mask, "exactly the sampled ids have a finite logprob"),
            ((self.policy_versions != NO_VERSION) == self.sampled_mask, "exactly the sampled ids have a version"),
            (self.sampled_mask | ~self.loss_mask, "the loss covers sampled ids only"),
            (np.isfinite(self.advantages), "advantages are finite"),
            (self.loss_mask | (self.advantages == 0), "advantages are zero outside the loss mask"),
        )
        if not reduce(and_, [holds for holds, _ in checks]).all():  # one look at all of a row that is right
            holds, rule = next((holds, rule) for holds, rule in checks if not holds.all())
            where = int(np.flatnonzero(~holds)[0])
            raise InvariantError(f"{rule}: broken at position {where} of {len(self.token_ids)}")

    def _check_controls(self) -> None:
        end = 0
        for span in self.controls:
            if not end <= span.start < span.stop <= len(self.token_ids):
                raise InvariantError(
                    f"controls must be in order and within {len(self.token_ids)} token_ids, got [{span.start}, "
                    f"{span.stop}) after {end}"
                )
            end = span.stop

    def _check_images(self) -> None:
        if (problem := find_misplaced_span(self.images, len(self.token_ids), of="token_ids")) is not None:
            raise InvariantError(problem)
        for k, span in enumerate(self.images):
            if self.sampled_mask[span.offset : span.stop].any():
                raise InvariantError(
                    f"images[{k}] must not cover sampled ids, got some in [{span.offset}, {span.stop})"
                )


_ROW_DTYPES = (
    ("sampled_mask", np.bool_),
    ("loss_mask", np.bool_),
    ("rollout_logprobs", np.float32),
    ("policy_versions", np.int32),
    ("advantages", np.float32),
)


def _check_kept(kept: KeptIds | None, sampled_ids: TokenIds, *, of: str) -> None:
    """Raise `InvariantError` unless there is a set for each of the ids, named `of`, which it is in."""
    if kept is None:
        return
    if len(kept) != len(sampled_ids):
        raise InvariantError(f"kept_ids has {len(kept)} sets for {len(sampled_ids)} {of}: every id needs one")
    if (where := kept.find_missing(sampled_ids)) is not None:
        raise InvariantError(f"{of}[{where}] is {sampled_ids[where]}, which is not in its kept_ids: it was cut")
