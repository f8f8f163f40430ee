"""Short ways to build the sequences that an engine returns."""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.types import FinishReason, SampledSequence, VersionSpan


def sampled(
    *ids: int,
    finish_reason: FinishReason = FinishReason.STOP,
    versions: Sequence[int] | None = None,
    temperature: float = 1.0,
    first: int = 1,
) -> SampledSequence:
    """A completion whose k-th id has the logprob -(first + k) / 8, and the version `versions[k]` (0 if left out)."""
    of_ids = [0] * len(ids) if versions is None else list(versions)
    spans = tuple(VersionSpan(start=k, stop=k + 1, policy_version=v) for k, v in enumerate(of_ids))
    return SampledSequence(
        completion_ids=list(ids),  # type: ignore[arg-type]
        rollout_logprobs=[-(first + k) / 8 for k in range(len(ids))],  # type: ignore[arg-type]
        finish_reason=finish_reason,
        version_spans=spans,
        temperature=temperature,
    )
