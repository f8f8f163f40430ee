"""The policy versions of sampled ids, as answers give them."""

from __future__ import annotations

from unbroken.types import SampleChunk, SampledSequence


def list_version_spans(sequence: SampledSequence | SampleChunk) -> list[list[int]]:
    """`[start, stop, policy_version]` for each span of completion ids."""
    return [[span.start, span.stop, span.policy_version] for span in sequence.version_spans]
