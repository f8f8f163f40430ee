"""What one forward pass adds to an update's loss: the policy loss, token by token, and the pull of a reference.

    sum over loss tokens of  normalization * (correction * policy loss + kl_weight * k3)

The correction is for the policy's advantage, so it leaves the reference term alone. A token that it masks still counts
in the normalization: what it masks makes an update smaller, not its other tokens larger.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from unbroken.training.batch import Batch
from unbroken.training.config import TrainerConfig
from unbroken.training.corrections import correction_weights
from unbroken.training.losses import PolicyLoss, clipped_policy_loss, k3_penalty


def batch_loss(logprobs_N: torch.Tensor, batch: Batch, config: TrainerConfig) -> PolicyLoss:
    """The batch's part of the update's loss, given the current logprobs of its loss tokens."""
    correction_N, beyond_N = correction_weights(
        batch.old_logprobs_N, batch.rollout_logprobs_N, batch.num_row_tokens, config.correction
    )
    loss, stats = clipped_policy_loss(
        logprobs_N,
        batch.old_logprobs_N,
        batch.advantages_N,
        weights_N=batch.normalization_N * correction_N,
        clip=config.clip,
    )
    stats = replace(stats, num_corrected=int(beyond_N.sum()))
    if batch.reference_logprobs_N is None:
        return PolicyLoss(loss, stats)
    k3_N = k3_penalty(logprobs_N, batch.reference_logprobs_N)
    loss = loss + config.kl_weight * (batch.normalization_N * k3_N).sum()
    return PolicyLoss(
        loss, replace(stats, loss_sum=float(loss.detach()), reference_k3_sum=float(k3_N.detach().double().sum()))
    )
