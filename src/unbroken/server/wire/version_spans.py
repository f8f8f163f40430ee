"""The policy versions of sampled ids, as answers give them."""

from __future__ import annotations

from typing import Any

from unbroken.types import SampleChunk, SampledSequence


def list_version_spans(sequence: SampledSequence | SampleChunk) -> list[list[int]]:
    """`[start, stop, policy_version]` for each span of completion ids."""
    return [[span.start, span.stop, span.policy_version] for span in sequence.version_spans]


def format_weight_versions(sequence: SampledSequence | SampleChunk) -> list[dict[str, Any]]:
    """The same as vLLM writes it, whose versions are texts."""
    return [
        {"version": str(version), "start": start, "end": stop} for start, stop, version in list_version_spans(sequence)
    ]
