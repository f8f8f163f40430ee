"""Sums over trajectories, for losses and corrections that weigh whole ones.

A row is usually a whole trajectory, whose sums a forward pass sees. A trajectory that forked has several rows, perhaps
in several passes: its sums come with the batch, computed before the update (`Batch.trajectories`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unbroken.errors import InvalidInputError
from unbroken.training.model.batch import Batch, TrajectorySums


def mean_log_ratio(logprobs_N: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[N] the mean of logprob - old logprob over the trajectory of each token, in float64 and without gradient.

    Raises `InvalidInputError` if a trajectory has several rows and its sum was not asked for (`PolicyLoss.is_joint`).
    """

    def log_ratio(sums: TrajectorySums) -> float:
        if sums.log_ratio is None:
            raise InvalidInputError(
                "a loss that reads mean_log_ratio must be given as PolicyLoss(..., is_joint=True), got one that is not"
            )
        return sums.log_ratio

    log_ratio_N = (logprobs_N.detach() - batch.old_logprobs_N).double()
    sums_N, counts_N = sum_by_trajectory(log_ratio_N, batch.num_row_tokens, batch.trajectories, log_ratio)
    return sums_N / counts_N


def sum_by_trajectory(
    values_N: torch.Tensor,
    num_row_tokens: Sequence[int],
    trajectories: Sequence[TrajectorySums | None],
    sum_of: Callable[[TrajectorySums], float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] the sum over the trajectory of each token, and [N] its number of tokens.

    Worked example, values 1 2 | 4 in rows of 2 and 1, of which the second is part of a trajectory of 3 tokens with the
    sum 9: sums 3 3 9 and counts 2 2 3.
    """
    counts_R = torch.tensor(list(num_row_tokens), device=values_N.device, dtype=torch.long)
    rows_N = torch.arange(len(counts_R), device=values_N.device).repeat_interleave(counts_R)
    sums_R = values_N.new_zeros(len(counts_R)).index_add(0, rows_N, values_N)
    for row, sums in enumerate(trajectories):
        if sums is not None:
            sums_R[row], counts_R[row] = sum_of(sums), sums.num_tokens
    return sums_R[rows_N], counts_R[rows_N]
