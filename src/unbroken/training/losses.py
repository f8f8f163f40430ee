"""The clipped policy loss, on the N loss tokens of any number of rows.

A loss sees no rows, no prompts and no padding: those were left behind when the loss tokens were picked out, so nothing
outside the loss mask can enter it. N may be 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from unbroken.errors import InvalidInputError
from unbroken.training.config import ClipConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStats:
    """Sums over loss tokens, so that those of two micro batches add up; the means are properties."""

    num_tokens: int = 0
    num_clipped: int = 0
    """Tokens without gradient, because their ratio had already moved past the clip the way the advantage pushes."""
    ratio_sum: float = 0.0
    k3_sum: float = 0.0
    loss_sum: float = 0.0

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats(
            num_tokens=self.num_tokens + other.num_tokens,
            num_clipped=self.num_clipped + other.num_clipped,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            k3_sum=self.k3_sum + other.k3_sum,
            loss_sum=self.loss_sum + other.loss_sum,
        )

    @property
    def loss(self) -> float:
        """Mean of the loss over the tokens."""
        return self.loss_sum / self.num_tokens

    @property
    def clip_fraction(self) -> float:
        """Share of tokens that the clip left without gradient."""
        return self.num_clipped / self.num_tokens

    @property
    def mean_ratio(self) -> float:
        """Mean of exp(logprob - old logprob)."""
        return self.ratio_sum / self.num_tokens

    @property
    def k3(self) -> float:
        """Estimate of KL(old policy || policy): mean of ratio - 1 - log(ratio), never negative."""
        return self.k3_sum / self.num_tokens


class PolicyLoss(NamedTuple):
    """A loss to call backward on, and what it was made of."""

    loss: torch.Tensor
    """Scalar."""
    stats: LossStats


def clipped_policy_loss(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    num_loss_tokens: int,
    clip: ClipConfig,
) -> PolicyLoss:
    """The PPO loss -min(r A, clip(r) A) with r = exp(logprob - old logprob), summed and divided by `num_loss_tokens`.

    `num_loss_tokens` counts the loss tokens of the whole update, over all its micro batches and processes: every token
    weighs the same, in a long row or a short one, however the rows were split (token mean, DAPO, arXiv:2503.14476).

    Raises:
        InvalidInputError: the three shapes differ, or N is larger than `num_loss_tokens`.
    """
    shapes = [tuple(t.shape) for t in (logprobs_N, old_logprobs_N, advantages_N)]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise InvalidInputError(f"logprobs, old_logprobs and advantages must share one shape [N], got {shapes}")
    if not max(len(logprobs_N), 1) <= num_loss_tokens:
        raise InvalidInputError(
            f"num_loss_tokens must count all loss tokens of the update: got {num_loss_tokens}, "
            f"and this part of it alone has {len(logprobs_N)}"
        )
    log_ratio_N = logprobs_N - old_logprobs_N
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    losses_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    loss_sum = losses_N.sum()
    with torch.no_grad():
        stats = LossStats(
            num_tokens=len(logprobs_N),
            num_clipped=int((clipped_N * advantages_N < ratio_N * advantages_N).sum()),
            ratio_sum=float(ratio_N.sum()),
            k3_sum=float((torch.expm1(log_ratio_N.double()) - log_ratio_N.double()).sum()),
            loss_sum=float(loss_sum.detach()),
        )
    return PolicyLoss(loss_sum / num_loss_tokens, stats)
