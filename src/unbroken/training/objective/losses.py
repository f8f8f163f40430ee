"""Losses of the policy gradient, by name. To add one, write its function here and give it a name in `LOSSES`.

A loss reads the logprobs of the N loss tokens of one forward pass (N may be 0), and of the batch the old logprobs, the
advantages, and, for losses over whole rows, the number of tokens of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch

from unbroken.training.config import ClipConfig
from unbroken.training.model.batch import Batch


class TokenLosses(NamedTuple):
    """The loss of each token, before it is weighted."""

    losses_N: torch.Tensor
    """With the gradient of the logprobs."""
    clipped_N: torch.Tensor
    """bool, the tokens whose ratio was clipped, for `train/clip_fraction`."""


PolicyLossFn: TypeAlias = Callable[[torch.Tensor, Batch, ClipConfig], TokenLosses]
"""From the current logprobs [N] of a batch's loss tokens to their losses. All rows of the batch are whole."""


def clipped(logprobs_N: torch.Tensor, batch: Batch, clip: ClipConfig) -> TokenLosses:
    """PPO's -min(r A, clip(r) A) with r = exp(logprob - old logprob) (arXiv:1707.06347)."""
    ratio_N = (logprobs_N - batch.old_logprobs_N).exp()
    clipped_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    losses_N = -torch.minimum(ratio_N * batch.advantages_N, clipped_N * batch.advantages_N)
    return TokenLosses(losses_N, clipped_N * batch.advantages_N < ratio_N * batch.advantages_N)


LOSSES: Mapping[str, PolicyLossFn] = {"clipped": clipped}
"""The names of `unbroken train --loss`."""
