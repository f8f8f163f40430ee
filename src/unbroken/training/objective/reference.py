"""The distance of the policy to a reference policy."""

from __future__ import annotations

import torch

from unbroken.errors import InvalidInputError


def k3_penalty(logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """[N] exp(reference - logprob) - (reference - logprob) - 1, with the gradient of the logprobs.

    On ids sampled by the policy its mean estimates KL(policy || reference) without bias, and no token's part is
    negative (Schulman's k3; the penalty of GRPO, arXiv:2402.03300). Worked example: the policy gives a sampled id the
    probability 1/2, the reference 1/4: 1/2 + log 2 - 1 = 0.1931. Raises `InvalidInputError` if shapes differ.
    """
    if logprobs_N.shape != reference_N.shape:
        raise InvalidInputError(
            f"logprobs and reference must share one shape [N], got {tuple(logprobs_N.shape)}, "
            f"{tuple(reference_N.shape)}"
        )
    gap_N = reference_N - logprobs_N
    return torch.expm1(gap_N) - gap_N
