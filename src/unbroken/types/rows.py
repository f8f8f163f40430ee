"""`TrainingSample`: a flat row to train on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import InvariantError
from unbroken.types.arrays import BoolMask, Logprobs, TokenIds, freeze, token_ids
from unbroken.types.images import ImageSpan, find_misplaced_span
from unbroken.types.routing import RoutedExperts, routed_experts

NO_VERSION = -1
"""The policy version of a token that no engine sampled."""


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
        self._check_images()

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
