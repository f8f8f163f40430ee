"""Conversion between our types and the native dialect's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from unbroken.types import (
    FinishReason,
    SampleChunk,
    SampledSequence,
    SampleResult,
    SamplingParams,
    ScoredSequence,
    TopLogprobs,
    VersionSpan,
    read_experts,
    token_ids,
)


def encode_params(params: SamplingParams) -> dict[str, Any]:
    """Encode sampling parameters. `return_routed_experts` is left out unless set: older servers refuse the key."""
    fields = asdict(params)
    return fields if params.return_routed_experts else {k: v for k, v in fields.items() if k != "return_routed_experts"}


def read_result(value: Mapping[str, Any]) -> SampleResult:
    """Read one prompt's answer. The types check that its parts fit together."""
    return SampleResult(
        prompt_ids=token_ids(value["prompt_ids"]),
        sequences=tuple(_read_sequence(sequence) for sequence in value["sequences"]),
        image_sha256s=tuple(value.get("image_sha256s", ())),
    )


def read_chunk(value: Mapping[str, Any]) -> SampleChunk:
    """Read one event of a stream."""
    finish_reason = value["finish_reason"]
    return SampleChunk(
        index=value["index"],
        completion_ids=token_ids(value["completion_ids"]),
        rollout_logprobs=value["rollout_logprobs"],
        top_logprobs=_read_top_logprobs(value["top_logprobs"]),
        finish_reason=None if finish_reason is None else FinishReason(finish_reason),
        version_spans=_read_spans(value["policy_versions"]),
        routed_experts=read_experts(value.get("routed_experts")),
        queue_s=value.get("queue_s"),
    )


def read_scored(value: Mapping[str, Any]) -> ScoredSequence:
    """Read the scores of one sequence."""
    return ScoredSequence(logprobs=value["logprobs"], top_logprobs=_read_top_logprobs(value["top_logprobs"]))


def _read_sequence(value: Mapping[str, Any]) -> SampledSequence:
    return SampledSequence(
        completion_ids=token_ids(value["completion_ids"]),
        rollout_logprobs=value["rollout_logprobs"],
        finish_reason=FinishReason(value["finish_reason"]),
        version_spans=_read_spans(value["policy_versions"]),
        temperature=value["temperature"],
        top_logprobs=_read_top_logprobs(value["top_logprobs"]),
        routed_experts=read_experts(value.get("routed_experts")),
        queue_s=value.get("queue_s"),
    )


def _read_top_logprobs(value: Mapping[str, Any] | None) -> TopLogprobs | None:
    return None if value is None else TopLogprobs(token_ids=value["token_ids"], logprobs=value["logprobs"])


def _read_spans(value: Sequence[Sequence[int]]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(start=start, stop=stop, policy_version=version) for start, stop, version in value)
