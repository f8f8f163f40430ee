"""Losses that `bench/staleness.py` compares with those of the package."""

from __future__ import annotations

import torch

from unbroken.training.loss_config import ClipConfig
from unbroken.training.model.batch import Batch
from unbroken.training.objective.losses import TokenLosses, clipped

MAX_DRIFT = 3e-3


def stop_at_drift(logprobs_N: torch.Tensor, batch: Batch, clip: ClipConfig) -> TokenLosses:
    """PPO's clip around the sampler, and no gradient at all while the mean k3 to the sampler is above `MAX_DRIFT`."""
    losses_N, clipped_N = clipped(logprobs_N, batch, clip)
    log_ratio_N = (logprobs_N.detach() - batch.old_logprobs_N).double()
    if len(log_ratio_N) and float((torch.expm1(log_ratio_N) - log_ratio_N).mean()) > MAX_DRIFT:
        return TokenLosses(0 * losses_N, torch.ones_like(clipped_N))
    return TokenLosses(losses_N, clipped_N)
