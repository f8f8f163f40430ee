"""The distance of the policy to a reference policy, from sampled ids (Schulman, "Approximating KL Divergence", 2020).

With d = logprob - reference logprob of an id that the policy samples, k1, k2 and k3 estimate KL(policy || reference).
Worked example: the policy gives a sampled id the probability 1/2, the reference 1/4, so d = log 2:

    k1    d                  0.6931     no bias, may be negative
    k2    d^2 / 2            0.2402     biased, little variance; its gradient is that of the KL
    k3    exp(-d) - 1 + d    0.1931     no bias, never negative
"""

from __future__ import annotations

import torch

from unbroken.errors import InvalidInputError
from unbroken.training.loss_config import KlEstimator


def kl_penalty(
    estimator: KlEstimator, logprobs_N: torch.Tensor, reference_N: torch.Tensor, old_logprobs_N: torch.Tensor
) -> torch.Tensor:
    """[N] the estimate of each token, with the gradient of the logprobs.

    `old_logprobs_N` is for the ratio that weighs `K3_RATIO_WEIGHTED`. Raises `InvalidInputError` if shapes differ.
    """
    match estimator:
        case KlEstimator.K1:
            return _subtract(logprobs_N, reference_N)
        case KlEstimator.K2:
            return _subtract(logprobs_N, reference_N).square() / 2
        case KlEstimator.K3:
            return k3(logprobs_N, reference_N)
        case KlEstimator.K3_RATIO_WEIGHTED:
            return _subtract(logprobs_N, old_logprobs_N).exp() * k3(logprobs_N, reference_N)


def k3(logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """[N] exp(reference - logprob) - (reference - logprob) - 1, the penalty of GRPO (arXiv:2402.03300)."""
    gap_N = _subtract(reference_N, logprobs_N)
    return torch.expm1(gap_N) - gap_N


def _subtract(left_N: torch.Tensor, right_N: torch.Tensor) -> torch.Tensor:
    if left_N.shape != right_N.shape:
        raise InvalidInputError(
            f"logprobs and reference must share one shape [N], got {tuple(left_N.shape)}, {tuple(right_N.shape)}"
        )
    return left_N - right_N
