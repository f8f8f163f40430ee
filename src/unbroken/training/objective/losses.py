"""The clipped policy loss and the distance to a reference, on the N loss tokens of any number of rows.

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
    """Sums over loss tokens, so that those of two micro batches add up; means over tokens are properties."""

    num_tokens: int = 0
    num_clipped: int = 0
    """Tokens without gradient, because their ratio had already moved past the clip the way the advantage pushes."""
    num_corrected: int = 0
    """Tokens that the correction truncated or masked."""
    ratio_sum: float = 0.0
    k3_sum: float = 0.0
    reference_k3_sum: float = 0.0
    loss_sum: float = 0.0
    """What was minimised: each token's loss times its weight."""

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats(
            num_tokens=self.num_tokens + other.num_tokens,
            num_clipped=self.num_clipped + other.num_clipped,
            num_corrected=self.num_corrected + other.num_corrected,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            k3_sum=self.k3_sum + other.k3_sum,
            reference_k3_sum=self.reference_k3_sum + other.reference_k3_sum,
            loss_sum=self.loss_sum + other.loss_sum,
        )

    @property
    def clip_fraction(self) -> float:
        """Share of tokens that the clip left without gradient."""
        return self.num_clipped / self.num_tokens

    @property
    def corrected_fraction(self) -> float:
        """Share of tokens that the correction truncated or masked."""
        return self.num_corrected / self.num_tokens

    @property
    def mean_ratio(self) -> float:
        """Mean of exp(logprob - old logprob)."""
        return self.ratio_sum / self.num_tokens

    @property
    def k3(self) -> float:
        """Estimate of KL(old policy || policy): mean of ratio - 1 - log(ratio), never negative."""
        return self.k3_sum / self.num_tokens

    @property
    def reference_k3(self) -> float:
        """Estimate of KL(policy || reference): mean of `k3_penalty`."""
        return self.reference_k3_sum / self.num_tokens


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
    weights_N: torch.Tensor,
    clip: ClipConfig,
) -> PolicyLoss:
    """The PPO loss -min(r A, clip(r) A) with r = exp(logprob - old logprob), times each token's weight, summed.

    With weights that add up to 1 over all micro batches and processes of the update (`token_weight`), the sum is a
    mean, however the rows were split.

    Raises:
        InvalidInputError: the four shapes differ.
    """
    shapes = [tuple(t.shape) for t in (logprobs_N, old_logprobs_N, advantages_N, weights_N)]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise InvalidInputError(
            f"logprobs, old_logprobs, advantages and weights must share one shape [N], got {shapes}"
        )
    log_ratio_N = logprobs_N - old_logprobs_N
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    losses_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    loss = (weights_N * losses_N).sum()
    num_clipped = int((clipped_N * advantages_N < ratio_N * advantages_N).sum())
    return PolicyLoss(loss, _stats(log_ratio_N, loss, num_clipped=num_clipped))


def linear_policy_loss(
    logprobs_N: torch.Tensor, old_logprobs_N: torch.Tensor, advantages_N: torch.Tensor, *, weights_N: torch.Tensor
) -> PolicyLoss:
    """The sum of -weight * advantage * logprob: the gradient of any loss whose derivatives by the logprobs are known.

    The old logprobs are for the statistics only. The sum itself means nothing.
    """
    loss = -(weights_N * advantages_N * logprobs_N).sum()
    return PolicyLoss(loss, _stats(logprobs_N - old_logprobs_N, loss))


def k3_penalty(logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """[N] exp(reference - logprob) - (reference - logprob) - 1, with the gradient of the logprobs.

    On ids sampled by the policy its mean estimates KL(policy || reference) without bias, and no token's part is
    negative (Schulman's k3; the penalty of GRPO, arXiv:2402.03300). Worked example: a policy that gives a sampled id
    the probability 1/2, under a reference of 1/4: 1/2 + log 2 - 1 = 0.1931.

    Raises:
        InvalidInputError: the shapes differ.
    """
    if logprobs_N.shape != reference_N.shape:
        raise InvalidInputError(
            f"logprobs and reference must share one shape [N], got {tuple(logprobs_N.shape)}, "
            f"{tuple(reference_N.shape)}"
        )
    gap_N = reference_N - logprobs_N
    return torch.expm1(gap_N) - gap_N


@torch.no_grad()
def _stats(log_ratio_N: torch.Tensor, loss: torch.Tensor, *, num_clipped: int = 0) -> LossStats:
    log_ratio_N = log_ratio_N.double()
    return LossStats(
        num_tokens=len(log_ratio_N),
        num_clipped=num_clipped,
        ratio_sum=float(log_ratio_N.exp().sum()),
        k3_sum=float((torch.expm1(log_ratio_N) - log_ratio_N).sum()),
        loss_sum=float(loss),
    )
