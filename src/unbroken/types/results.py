"""An engine's answer to a request, and the check that it belongs to that request (I3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unbroken.errors import EchoError, InvariantError
from unbroken.types.arrays import TokenIds, count_common_prefix, token_ids
from unbroken.types.sampling import SampleRequest
from unbroken.types.sequences import SampledSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """The completions of a request, with the prompt that the engine reports it used."""

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
        """Raise `EchoError` if the prompt or the number of completions differs from `request` (I3)."""
        self.check_prompt(request)
        if len(self.sequences) != request.n:
            raise EchoError(f"asked for n={request.n} completions, got {len(self.sequences)} ({request.request_id})")

    def check_prompt(self, request: SampleRequest) -> None:
        """Raise `EchoError` if the prompt or its images differ from `request` (I3)."""
        asked = request.image_sha256s
        if self.image_sha256s != asked:
            raise EchoError(
                f"the engine reports the images {[name[:12] for name in self.image_sha256s]}, but it was sent "
                f"{[name[:12] for name in asked]} (request {request.request_id})"
            )
        if not np.array_equal(self.prompt_ids, request.prompt_ids):
            where = count_common_prefix(self.prompt_ids, request.prompt_ids)
            raise EchoError(
                f"the engine reports a prompt of {len(self.prompt_ids)} ids that differs from the "
                f"{len(request.prompt_ids)} it was sent, first at position {where} (request {request.request_id})"
            )
