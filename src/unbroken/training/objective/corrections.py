"""Weights that correct a loss for the gap between sampler and trainer: rounding, kernels, older weights.

The ratio is the trainer's probability of a sampled id divided by the sampler's (importance sampling). A correction is
only needed if the loss's own ratio is relative to the trainer's logprobs (`OldLogprobs.RECOMPUTE`); a ratio to the
sampler's corrects already. A trajectory that forked into several rows has one product over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from unbroken.errors import InvalidInputError
from unbroken.training.loss_config import Correction, CorrectionKind
from unbroken.training.model.batch import TrajectorySums
from unbroken.training.objective.trajectories import sum_by_trajectory


class CorrectionWeights(NamedTuple):
    """Factors of the tokens' losses, without gradient, and which tokens were truncated or masked (bool)."""

    weights_N: torch.Tensor
    corrected_N: torch.Tensor


def correction_weights(
    trainer_logprobs_N: torch.Tensor,
    rollout_logprobs_N: torch.Tensor,
    num_row_tokens: Sequence[int],
    correction: Correction,
    trajectories: Sequence[TrajectorySums | None] = (),
) -> CorrectionWeights:
    """The factor of each token's loss, by the trainer's logprobs before the update and the sampler's.

    Worked example, two rows of two tokens with the ratios 1.5, 2 and 1, 0.5, bounds 0.6 and 1.8:

        token_truncate      1.5  1.8   1    0.5
        token_mask          1.5  0     1    0
        sequence_truncate   1.8  1.8   0.5  0.5      products 3 and 0.5
        sequence_mask       0    0     0    0

    `num_row_tokens` are the loss tokens of each row, in order; `trajectories` are those of the batch.

    Raises:
        InvalidInputError: shapes differ, or the rows do not add up to N.
    """
    if trainer_logprobs_N.shape != rollout_logprobs_N.shape or sum(num_row_tokens) != len(trainer_logprobs_N):
        raise InvalidInputError(
            f"trainer_logprobs, rollout_logprobs and the rows must have the same tokens, got "
            f"{tuple(trainer_logprobs_N.shape)}, {tuple(rollout_logprobs_N.shape)} and {sum(num_row_tokens)}"
        )
    with torch.no_grad():
        log_ratio_N = trainer_logprobs_N.double() - rollout_logprobs_N.double()
        sums_N, _ = sum_by_trajectory(log_ratio_N, num_row_tokens, trajectories, lambda sums: sums.sampler_gap)
        weights_N, corrected_N = _compute_weights(log_ratio_N.exp(), sums_N.exp(), correction)
        return CorrectionWeights(weights_N.to(trainer_logprobs_N.dtype), corrected_N)


def _compute_weights(
    ratios_N: torch.Tensor, products_N: torch.Tensor, correction: Correction
) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = correction.bounds
    match correction.effect:
        case CorrectionKind.TOKEN_TRUNCATE:
            return ratios_N.clamp(max=high), ratios_N > high
        case CorrectionKind.TOKEN_MASK:
            return _mask(ratios_N, low, high)
        case CorrectionKind.SEQUENCE_TRUNCATE:
            return products_N.clamp(max=high), products_N > high
        case CorrectionKind.SEQUENCE_MASK:
            return _mask(products_N, low, high)
        case _:
            return torch.ones_like(ratios_N), torch.zeros_like(ratios_N, dtype=torch.bool)


def _mask(ratios_N: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    corrected_N = (ratios_N < low) | (ratios_N > high)
    return ratios_N.masked_fill(corrected_N, 0), corrected_N
