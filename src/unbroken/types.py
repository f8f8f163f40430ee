"""The vocabulary: token ids and the facts that travel with them, from the engine to the optimiser.

Shapes: T is the length of one whole sequence, C the length of one completion. Token ids are numpy int32, logprobs
float32 natural logarithms. Everything here is immutable and checked when it is built: a sequence whose parts disagree
cannot exist, so no later stage has to make lengths fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import EchoError, InvalidInputError, InvariantError, SamplingError

TokenIds: TypeAlias = NDArray[np.int32]
"""Token ids in order, int32."""
Logprobs: TypeAlias = NDArray[np.float32]
"""Natural-log probabilities, float32."""
BoolMask: TypeAlias = NDArray[np.bool_]
"""One flag per token."""

NO_VERSION = -1
"""The policy version of a token that no engine sampled."""
TEMPERATURES = (0.01, 100.0)
"""Least and greatest temperature to sample or score at: below, float32 logits divided by it are too coarse to agree."""


def token_ids(values: Iterable[int] | NDArray[Any], *, name: str = "token_ids") -> TokenIds:
    """Return `values` as a read-only int32 array of shape [T].

    Raises:
        InvalidInputError: a value is not a whole number, is negative, or does not fit into int32.
    """
    array = np.asarray(values if isinstance(values, (np.ndarray, Sequence)) else list(values))
    if array.size == 0:
        array = np.zeros(0, dtype=np.int32)
    if array.ndim != 1:
        raise InvalidInputError(f"{name} must be one-dimensional, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise InvalidInputError(f"{name} must be whole numbers, got dtype {array.dtype}")
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        raise InvalidInputError(f"{name} must lie in [0, 2**31), got {array.min()} to {array.max()}")
    ids: TokenIds = frozen(array.astype(np.int32, copy=False))
    return ids


def frozen(array: NDArray[Any]) -> Any:
    """Return `array` if nobody can write to its memory, else a read-only copy: recorded facts are not edited."""
    if array.flags.writeable or not _is_fixed(array if array.base is None else array.base):
        array = array.copy()
        array.flags.writeable = False
    return array


def is_whole(value: Any, low: int, high: int = 2**31 - 1) -> bool:
    """Whether `value` is an integer, and no bool, in [low, high]."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(low <= value <= high)


def is_real(value: Any, low: float, high: float) -> bool:
    """Whether `value` is a number, and no bool, in [low, high]; NaN is in no range."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return is_number and bool(low <= value <= high)


def _is_id(value: Any) -> bool:
    return is_whole(value, 0)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_tuple(values: Any, is_member: Callable[[Any], bool]) -> bool:
    return isinstance(values, tuple) and all(map(is_member, values))


def _check_rules(checked: Any, rules: Iterable[tuple[str, bool, str]]) -> None:
    """Raise `SamplingError` for the first field of (name, whether its rule holds, rule) that breaks its rule."""
    for name, holds, rule in rules:
        if not holds:
            raise SamplingError(f"{name} must be {rule}, got {getattr(checked, name)!r}")


def _check_tops(tops: TopLogprobs | None, num_ids: int, what: str) -> None:
    if tops is not None and len(tops) != num_ids:
        raise InvariantError(f"top_logprobs has {len(tops)} positions for {num_ids} {what}")


def _is_fixed(owner: Any) -> bool:
    return isinstance(owner, np.ndarray) and owner.flags.owndata and not owner.flags.writeable


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop id was sampled (it is the last completion id) or a stop string appeared."""
    LENGTH = "length"
    """`max_tokens` or the context length was reached."""
    ABORT = "abort"
    """The request was aborted; its ids are partial and are never trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """The completion ids [start, stop) were sampled by the weights `policy_version` (I6)."""

    start: int
    stop: int
    policy_version: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InvariantError(f"a version span must satisfy 0 <= start < stop, got [{self.start}, {self.stop})")
        if self.policy_version < 0:
            raise InvariantError(f"policy_version must be >= 0, got {self.policy_version}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """Where one image's placeholder ids stand in a token sequence, and which image it is."""

    offset: int
    """Index of the first placeholder id."""
    length: int
    """Number of placeholder ids, after expansion."""
    sha256: str
    """Hex digest of the image's encoded bytes: the identity that both engine and trainer check."""

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise InvariantError(f"an image span needs offset >= 0 and length >= 1, got {self.offset}, {self.length}")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise InvariantError(f"sha256 must be 64 lower-case hex digits, got {self.sha256!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What the text of a completion must be; exactly one of the fields is given.

    Ids that would break it are never sampled, so the logprobs are those of what was left.
    """

    regex: str | None = None
    """A regular expression for the whole text."""
    json_schema: str | None = None
    """A JSON schema, as JSON text."""

    def __post_init__(self) -> None:
        given = [name for name in ("regex", "json_schema") if getattr(self, name) is not None]
        if len(given) != 1:
            raise SamplingError(f"structured_output needs exactly one of regex and json_schema, got {given or 'none'}")
        if not _is_text(getattr(self, given[0])):
            raise SamplingError(
                f"structured_output.{given[0]} must be a non-empty string, got {getattr(self, given[0])!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample. The logprobs that come back are those of the distribution after all of it was applied.

    Only `temperature` can be followed by the trainer, which scales its logits the same way. With top-k, top-p, min-p or
    penalties the sampled distribution is not the trainer's, and the ratio between them is not 1 at equal weights.
    """

    max_tokens: int = 512
    """Most ids to sample, stop id included."""
    temperature: float = 1.0
    """0, which takes the most likely id and has the logprobs of temperature 1, or within `TEMPERATURES`."""
    top_k: int = 0
    """Keep the k most likely ids; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely ids whose mass reaches this."""
    min_p: float = 0.0
    """Keep ids at least this times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of ids seen in prompt or completion (CTRL, arXiv:1909.05858).
    0.01 to 100."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of ids already in the completion; -100 to 100."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the completion; -100 to 100."""
    seed: int | None = None
    """Makes the request repeatable on the same engine, however it was batched; completion i of n is sampled from its
    own stream. None draws a fresh seed."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the completion; the sampled one is kept as its last id."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end the completion; the ids that spell them are kept, as all that was sampled is."""
    structured_output: StructuredOutput | None = None
    """A form that the text must have; not every engine can force one."""
    num_top_logprobs: int = 0
    """How many of the most likely ids to report at each position, beside the sampled one."""

    def __post_init__(self) -> None:
        rules = (
            ("max_tokens", is_whole(self.max_tokens, 1), "a whole number in [1, 2**31)"),
            ("temperature", self._has_temperature(), f"0 or a number in {list(TEMPERATURES)}"),
            ("top_k", is_whole(self.top_k, 0), "a whole number in [0, 2**31), where 0 is off"),
            ("top_p", is_real(self.top_p, 0, 1) and self.top_p != 0, "a number in (0, 1]"),
            ("min_p", is_real(self.min_p, 0, 1), "a number in [0, 1]"),
            ("repetition_penalty", is_real(self.repetition_penalty, 0.01, 100), "a number in [0.01, 100]"),
            ("presence_penalty", is_real(self.presence_penalty, -100, 100), "a number in [-100, 100]"),
            ("frequency_penalty", is_real(self.frequency_penalty, -100, 100), "a number in [-100, 100]"),
            ("seed", self.seed is None or is_whole(self.seed, 0, 2**63 - 1), "None or a whole number in [0, 2**63)"),
            ("stop_token_ids", _is_tuple(self.stop_token_ids, _is_id), "a tuple of ids in [0, 2**31)"),
            ("stop_strings", _is_tuple(self.stop_strings, _is_text), "a tuple of non-empty strings"),
            (
                "structured_output",
                self.structured_output is None or isinstance(self.structured_output, StructuredOutput),
                "None or a StructuredOutput",
            ),
            ("num_top_logprobs", is_whole(self.num_top_logprobs, 0), "a whole number in [0, 2**31)"),
        )
        _check_rules(self, rules)

    def _has_temperature(self) -> bool:
        return is_real(self.temperature, 0, 0) or is_real(self.temperature, *TEMPERATURES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The K most likely ids at each position, most likely first, and their logprobs under the same distribution."""

    token_ids: NDArray[np.int32]
    """[C, K]"""
    logprobs: Logprobs
    """[C, K] -inf where the distribution has fewer than K ids."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", frozen(np.asarray(self.token_ids, dtype=np.int32)))
        object.__setattr__(self, "logprobs", frozen(np.asarray(self.logprobs, dtype=np.float32)))
        if self.token_ids.ndim != 2 or self.token_ids.shape != self.logprobs.shape:
            raise InvariantError(
                f"top logprobs need ids and logprobs of one shape [C, K], got {self.token_ids.shape} and "
                f"{self.logprobs.shape}"
            )

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSequence:
    """The logprobs of given ids, for a sequence of T ids."""

    logprobs: Logprobs
    """[T - 1] of each id after the first, given the ids before it."""
    top_logprobs: TopLogprobs | None = None
    """[T - 1, K] if asked for."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "logprobs", frozen(np.asarray(self.logprobs, dtype=np.float32)))
        _check_tops(self.top_logprobs, len(self.logprobs), "scored ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One completion, exactly as an engine sampled it (I2).

    Every id has one finite logprob and belongs to exactly one version span. A sampled stop id is the last of the ids.
    """

    completion_ids: TokenIds
    """[C] what the model sampled, stop id included; empty only for an aborted request."""
    rollout_logprobs: Logprobs
    """[C] logprob of each id under the distribution it was drawn from."""
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    """Consecutive spans that cover [0, C)."""
    temperature: float = 1.0
    """The temperature that the logprobs refer to; 1.0 for greedy sampling."""
    top_logprobs: TopLogprobs | None = None
    """[C, K] if the request asked for them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "completion_ids", token_ids(self.completion_ids, name="completion_ids"))
        object.__setattr__(self, "rollout_logprobs", frozen(np.asarray(self.rollout_logprobs, dtype=np.float32)))
        if not isinstance(self.finish_reason, FinishReason):
            raise InvariantError(f"finish_reason must be a FinishReason, got {self.finish_reason!r}")
        num_ids = len(self.completion_ids)
        if self.rollout_logprobs.shape != (num_ids,):
            raise InvariantError(
                f"rollout_logprobs has shape {self.rollout_logprobs.shape} for {num_ids} completion_ids: "
                "the engine must return one logprob per sampled token, stop token included"
            )
        if not np.isfinite(self.rollout_logprobs).all():
            where = int(np.flatnonzero(~np.isfinite(self.rollout_logprobs))[0])
            raise InvariantError(f"rollout_logprobs[{where}] is {self.rollout_logprobs[where]}, must be finite")
        if num_ids == 0 and self.finish_reason is not FinishReason.ABORT:
            raise InvariantError(f"completion_ids is empty with finish_reason {self.finish_reason.value!r}")
        end = 0
        for span in self.version_spans:
            if span.start != end:
                raise InvariantError(f"version_spans must be consecutive: expected start {end}, got {span.start}")
            end = span.stop
        if end != num_ids:
            raise InvariantError(f"version_spans cover {end} of {num_ids} completion_ids: every one needs a version")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise InvariantError(f"temperature must be finite and > 0, got {self.temperature}")
        _check_tops(self.top_logprobs, num_ids, "completion_ids")

    @property
    def policy_versions(self) -> NDArray[np.int32]:
        """[C] the policy version of each id."""
        out = np.empty(len(self.completion_ids), dtype=np.int32)
        for span in self.version_spans:
            out[span.start : span.stop] = span.policy_version
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleChunk:
    """What one completion of a request sampled since its chunk before; its last chunk has a finish reason.

    A completion's chunks, joined, are its `SampledSequence`.
    """

    index: int
    """Which of the request's n completions."""
    completion_ids: TokenIds
    """[K] in the last chunk perhaps none."""
    rollout_logprobs: Logprobs
    """[K]"""
    top_logprobs: TopLogprobs | None = None
    finish_reason: FinishReason | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    """Of the whole completion, in its last chunk."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "completion_ids", token_ids(self.completion_ids, name="completion_ids"))
        object.__setattr__(self, "rollout_logprobs", frozen(np.asarray(self.rollout_logprobs, dtype=np.float32)))
        if len(self.rollout_logprobs) != len(self.completion_ids):
            raise InvariantError(
                f"rollout_logprobs has {len(self.rollout_logprobs)} entries for {len(self.completion_ids)} "
                "completion_ids of a chunk"
            )
        _check_tops(self.top_logprobs, len(self.completion_ids), "completion_ids of a chunk")

    @staticmethod
    def join(chunks: Sequence[SampleChunk], *, temperature: float) -> SampledSequence:
        """The completion of which these are all chunks, in order."""
        last = chunks[-1]
        if last.finish_reason is None:
            raise InvariantError("the last chunk of a completion must have a finish reason")
        tops = [chunk.top_logprobs for chunk in chunks if chunk.top_logprobs is not None and len(chunk.top_logprobs)]
        return SampledSequence(
            completion_ids=np.concatenate([chunk.completion_ids for chunk in chunks]),
            rollout_logprobs=np.concatenate([chunk.rollout_logprobs for chunk in chunks]),
            finish_reason=last.finish_reason,
            version_spans=last.version_spans,
            temperature=temperature,
            top_logprobs=TopLogprobs(
                token_ids=np.concatenate([top.token_ids for top in tops]),
                logprobs=np.concatenate([top.logprobs for top in tops]),
            )
            if tops
            else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """What an engine is asked to continue: ids in, ids out."""

    request_id: str
    """Unique among the requests in flight; what `Engine.abort` takes."""
    prompt_ids: TokenIds
    """[T] at least one id."""
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    """Independent completions of the same prompt."""
    images: tuple[ImageSpan, ...] = ()
    """The images whose placeholders stand in `prompt_ids`, in order."""
    adapter: str | None = None
    """Name of a LoRA adapter that the engine has; None is the model itself."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", token_ids(self.prompt_ids, name="prompt_ids"))
        if len(self.prompt_ids) == 0:
            raise SamplingError("prompt_ids must hold at least one id, got none")
        rules = (
            ("request_id", _is_text(self.request_id), "a non-empty string"),
            ("n", is_whole(self.n, 1), "a whole number in [1, 2**31)"),
            ("params", isinstance(self.params, SamplingParams), "SamplingParams"),
            ("adapter", self.adapter is None or _is_text(self.adapter), "None or a non-empty string"),
        )
        _check_rules(self, rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """What an engine sampled, with the prompt it says it used."""

    prompt_ids: TokenIds
    """[T] the engine's own account of its prompt, to be compared with what was sent (I3)."""
    sequences: tuple[SampledSequence, ...]
    """n completions, in order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", token_ids(self.prompt_ids, name="prompt_ids"))

    def check_answers(self, request: SampleRequest) -> None:
        """Raise `EchoError` unless prompt and number of completions are those of `request` (I3)."""
        self.check_prompt(request)
        if len(self.sequences) != request.n:
            raise EchoError(f"asked for n={request.n} completions, got {len(self.sequences)} ({request.request_id})")

    def check_prompt(self, request: SampleRequest) -> None:
        """Raise `EchoError` unless the prompt is that of `request` (I3)."""
        if not np.array_equal(self.prompt_ids, request.prompt_ids):
            same = min(len(self.prompt_ids), len(request.prompt_ids))
            differs = np.flatnonzero(self.prompt_ids[:same] != request.prompt_ids[:same])
            where = int(differs[0]) if differs.size else same
            raise EchoError(
                f"the engine reports a prompt of {len(self.prompt_ids)} ids that differs from the "
                f"{len(request.prompt_ids)} it was sent, first at position {where} (request {request.request_id})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One flat row to train on: a whole sequence with what is known of each of its T tokens.

    `sampled_mask` is a fact and `loss_mask` a policy: the loss never covers an id that was not sampled, but may leave
    out ids that were (a token shared by two branches is trained in one of them only).
    """

    token_ids: TokenIds
    """[T]"""
    sampled_mask: BoolMask
    """[T] true exactly on ids that an engine sampled."""
    loss_mask: BoolMask
    """[T] true on the ids the loss covers."""
    rollout_logprobs: Logprobs
    """[T] the sampler's logprob; NaN, and never a number, where `sampled_mask` is false."""
    policy_versions: NDArray[np.int32]
    """[T] the version that sampled the id; `NO_VERSION` where `sampled_mask` is false."""
    advantages: NDArray[np.float32]
    """[T] zero where `loss_mask` is false."""
    temperature: float = 1.0
    """The one temperature that all of `rollout_logprobs` refer to."""
    images: tuple[ImageSpan, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", token_ids(self.token_ids))
        for name, dtype in _ROW_DTYPES:
            object.__setattr__(self, name, frozen(np.asarray(getattr(self, name), dtype=dtype)))
            if getattr(self, name).shape != self.token_ids.shape:
                raise InvariantError(
                    f"{name} has shape {getattr(self, name).shape} for {len(self.token_ids)} token_ids: they must agree"
                )
        checks = (
            (np.isfinite(self.rollout_logprobs) == self.sampled_mask, "exactly the sampled ids have a finite logprob"),
            ((self.policy_versions != NO_VERSION) == self.sampled_mask, "exactly the sampled ids have a version"),
            (self.sampled_mask | ~self.loss_mask, "the loss covers sampled ids only"),
            (np.isfinite(self.advantages), "advantages are finite"),
            (self.loss_mask | (self.advantages == 0), "advantages are zero outside the loss mask"),
        )
        for holds, rule in checks:
            if not holds.all():
                where = int(np.flatnonzero(~holds)[0])
                raise InvariantError(f"{rule}: broken at position {where} of {len(self.token_ids)}")


_ROW_DTYPES = (
    ("sampled_mask", np.bool_),
    ("loss_mask", np.bool_),
    ("rollout_logprobs", np.float32),
    ("policy_versions", np.int32),
    ("advantages", np.float32),
)
