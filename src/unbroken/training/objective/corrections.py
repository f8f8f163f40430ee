"""Weights that correct a loss for the gap between sampler and trainer: rounding, kernels, older weights.

The ratio is the trainer's probability of a sampled id divided by the sampler's (importance sampling). A correction is
only needed if the loss's own ratio is relative to the trainer's logprobs (`OldLogprobs.RECOMPUTE`); a ratio to the
sampler's corrects already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from unbroken.errors import InvalidInputError
from unbroken.training.config import Correction, CorrectionKind


class CorrectionWeights(NamedTuple):
    """Factors of the tokens' losses, without gradient, and which tokens were truncated or masked (bool)."""

    weights_N: torch.Tensor
    corrected_N: torch.Tensor


def correction_weights(
    trainer_logprobs_N: torch.Tensor,
    rollout_logprobs_N: torch.Tensor,
    num_row_tokens: Sequence[int],
    correction: Correction,
) -> CorrectionWeights:
    """The factor of each token's loss, by the trainer's logprobs before the update and the sampler's.

    Worked example, two rows of two tokens with the ratios 1.5, 2 and 1, 0.5, bounds 0.6 and 1.8:

        token_truncate   1.5  1.8   1    0.5
        token_mask       1.5  0     1    0
        sequence_mask    0    0     0    0       products 3 and 0.5

    `num_row_tokens` are the loss tokens of each row, in order.

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
        weights_N, corrected_N = _compute_weights(log_ratio_N, num_row_tokens, correction)
        return CorrectionWeights(weights_N.to(trainer_logprobs_N.dtype), corrected_N)


def _compute_weights(
    log_ratio_N: torch.Tensor, num_row_tokens: Sequence[int], correction: Correction
) -> tuple[torch.Tensor, torch.Tensor]:
    match correction.kind:
        case CorrectionKind.NONE:
            return torch.ones_like(log_ratio_N), torch.zeros_like(log_ratio_N, dtype=torch.bool)
        case CorrectionKind.TOKEN_TRUNCATE:
            ratio_N = log_ratio_N.exp()
            return ratio_N.clamp(max=correction.high), ratio_N > correction.high
        case CorrectionKind.TOKEN_MASK:
            return _mask(log_ratio_N.exp(), correction)
        case CorrectionKind.SEQUENCE_MASK:
            lengths_R = torch.tensor(list(num_row_tokens), device=log_ratio_N.device, dtype=torch.long)
            rows_N = torch.arange(len(lengths_R), device=log_ratio_N.device).repeat_interleave(lengths_R)
            sums_R = log_ratio_N.new_zeros(len(lengths_R)).index_add(0, rows_N, log_ratio_N)
            return _mask(sums_R.exp()[rows_N], correction)


def _mask(ratios_N: torch.Tensor, correction: Correction) -> tuple[torch.Tensor, torch.Tensor]:
    corrected_N = (ratios_N < correction.low) | (ratios_N > correction.high)
    return ratios_N.masked_fill(corrected_N, 0), corrected_N
