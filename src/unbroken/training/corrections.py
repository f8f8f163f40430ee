"""Weights that correct a loss for ids sampled by another policy than the trainer computes: rounding, kernels, lag.

The ratio is the trainer's probability of what was sampled, divided by the sampler's (importance sampling). It is only
needed where the update's own ratio is taken against the trainer's logprobs (`OldLogprobs.RECOMPUTE`); against the
sampler's it is in there already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from unbroken.errors import InvalidInputError


class CorrectionKind(StrEnum):
    """What becomes of a ratio beyond its bounds."""

    NONE = "none"
    """Every weight is 1."""
    TOKEN_TRUNCATE = "token_truncate"
    """A token's ratio, at most the upper bound (TIS)."""
    TOKEN_MASK = "token_mask"
    """A token's ratio inside the bounds, else 0 (IcePop, MIS)."""
    SEQUENCE_MASK = "sequence_mask"
    """The product of a row's ratios inside the bounds, for all its tokens, else 0 for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Which correction, and its bounds."""

    kind: CorrectionKind = CorrectionKind.NONE
    low: float = 0.0
    """Least ratio that a mask lets pass."""
    high: float = 2.0
    """Greatest ratio, and where truncation stops."""

    def __post_init__(self) -> None:
        if not 0 <= self.low < 1 < self.high:
            raise InvalidInputError(f"Correction needs 0 <= low < 1 < high, got low={self.low}, high={self.high}")


def correction_weights(
    trainer_logprobs_N: torch.Tensor,
    rollout_logprobs_N: torch.Tensor,
    num_row_tokens: Sequence[int],
    correction: Correction,
) -> torch.Tensor:
    """[N] what each token's loss is multiplied by; without gradient.

    Worked example, two rows of two tokens with the ratios 1.5, 2 and 1, 0.5, bounds 0.6 and 1.8:

        token_truncate   1.5  1.8   1    0.5
        token_mask       1.5  0     1    0
        sequence_mask    0    0     0    0       products 3 and 0.5

    Args:
        trainer_logprobs_N: the trainer's, before the update.
        rollout_logprobs_N: the sampler's.
        num_row_tokens: loss tokens of each row, in order; they add up to N.
        correction: which.

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
        return _weights(log_ratio_N, num_row_tokens, correction).to(trainer_logprobs_N.dtype)


def _weights(log_ratio_N: torch.Tensor, num_row_tokens: Sequence[int], correction: Correction) -> torch.Tensor:
    match correction.kind:
        case CorrectionKind.NONE:
            return torch.ones_like(log_ratio_N)
        case CorrectionKind.TOKEN_TRUNCATE:
            return log_ratio_N.exp().clamp(max=correction.high)
        case CorrectionKind.TOKEN_MASK:
            return _masked(log_ratio_N.exp(), correction)
        case CorrectionKind.SEQUENCE_MASK:
            lengths_R = torch.tensor(list(num_row_tokens), device=log_ratio_N.device, dtype=torch.long)
            rows_N = torch.arange(len(lengths_R), device=log_ratio_N.device).repeat_interleave(lengths_R)
            sums_R = log_ratio_N.new_zeros(len(lengths_R)).index_add(0, rows_N, log_ratio_N)
            return _masked(sums_R.exp(), correction)[rows_N]


def _masked(ratios: torch.Tensor, correction: Correction) -> torch.Tensor:
    return ratios.where((ratios >= correction.low) & (ratios <= correction.high), torch.zeros_like(ratios))
