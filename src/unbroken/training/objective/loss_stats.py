"""Statistics of a loss as sums, which can be added over micro batches, updates and processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from unbroken.training.sums import Sums


class ObjectiveStats(Protocol):
    """Statistics that only one objective has."""

    def __add__(self, other: Self) -> Self: ...

    def get_metrics(self) -> Mapping[str, float | None]:
        """The metrics to log."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStats(Sums):
    """Sums over loss tokens; means over tokens are properties."""

    num_tokens: int = 0
    num_clipped: int = 0
    """Tokens without gradient, whose ratio is already past the clip in the direction that the advantage pushes."""
    num_corrected: int = 0
    """Tokens that the correction truncated or masked."""
    entropy_sum: float = 0.0
    ratio_sum: float = 0.0
    k3_sum: float = 0.0
    reference_k3_sum: float = 0.0
    loss_sum: float = 0.0
    """Each token's loss times its weight."""

    @staticmethod
    @torch.no_grad()
    def measure(
        logprobs_N: torch.Tensor,
        old_logprobs_N: torch.Tensor,
        *,
        entropies_N: torch.Tensor | None,
        penalty_N: torch.Tensor | None,
        loss: float = 0.0,
        num_clipped: int = 0,
        num_corrected: int = 0,
    ) -> LossStats:
        """The sums of one forward pass; `penalty_N` is the k3 of the reference, if there is one."""
        log_ratio_N = (logprobs_N - old_logprobs_N).double()
        return LossStats(
            num_tokens=len(log_ratio_N),
            num_clipped=num_clipped,
            num_corrected=num_corrected,
            entropy_sum=0.0 if entropies_N is None else float(entropies_N.double().sum()),
            ratio_sum=float(log_ratio_N.exp().sum()),
            k3_sum=float((torch.expm1(log_ratio_N) - log_ratio_N).sum()),
            reference_k3_sum=0.0 if penalty_N is None else float(penalty_N.double().sum()),
            loss_sum=loss,
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
    def entropy(self) -> float:
        """Mean entropy of the policy, in nats."""
        return self.entropy_sum / self.num_tokens

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
        """Estimate of KL(policy || reference): mean of k3."""
        return self.reference_k3_sum / self.num_tokens
