"""Losses of the policy gradient, by name. To add one, write its function here and give it a name in `LOSSES`.

A loss sees the N loss tokens of one forward pass, row by row: no prompts, no padding, no weights. N may be 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from unbroken.training.config import ClipConfig


class TokenLosses(NamedTuple):
    """The loss of each token, before it is weighted."""

    losses_N: torch.Tensor
    """With the gradient of the logprobs."""
    clipped_N: torch.Tensor
    """bool, the tokens whose gradient the clip changed; they are counted in `train/clip_fraction`."""


class PolicyLossFn(Protocol):
    """A loss of the policy gradient."""

    def __call__(
        self,
        logprobs_N: torch.Tensor,
        old_logprobs_N: torch.Tensor,
        advantages_N: torch.Tensor,
        *,
        num_row_tokens: Sequence[int],
        clip: ClipConfig,
    ) -> TokenLosses:
        """`num_row_tokens` are the loss tokens of each row, N in all; a row is never split over two passes."""
        ...


def clipped(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    num_row_tokens: Sequence[int],
    clip: ClipConfig,
) -> TokenLosses:
    """PPO's -min(r A, clip(r) A) with r = exp(logprob - old logprob) (arXiv:1707.06347)."""
    ratio_N = (logprobs_N - old_logprobs_N).exp()
    clipped_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    losses_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    return TokenLosses(losses_N, clipped_N * advantages_N < ratio_N * advantages_N)


LOSSES: Mapping[str, PolicyLossFn] = {"clipped": clipped}
"""The names of `unbroken train --loss`."""
