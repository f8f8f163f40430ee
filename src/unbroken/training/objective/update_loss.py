"""What is minimised, as two things: the weight of each row's tokens in an update, and the loss of one forward pass.

On rows with advantages, it is the clipped policy loss and the pull of a reference, token by token:

    sum over loss tokens of  weight * (correction * policy loss + kl_weight * k3)

The correction is for the policy's advantage, so it leaves the reference term alone. A token that it masks still counts
in the weights: what it masks makes an update smaller, not its other tokens larger.

On preference pairs (DPO), two trajectories share one loss, and their rows need not fit one forward pass. So the margins
are computed first, without gradient. The loss of a pair is a function f of its margin alone, and the margin is a sum of
logprobs with the signs of the advantages (1 chosen, -1 rejected), so by the chain rule the gradient is exactly

    sum over loss tokens of  f'(margin) * advantage * gradient of the logprob

which is the same pass over rows as before, with weights that a pair's rows share. It costs one more forward pass of
each row, and needs no more memory than a row. Worked example, two pairs, beta 0.5, margins 2 and -2: the weights are
0.5 * sigmoid(-1) / 2 = 0.0672 and 0.5 * sigmoid(1) / 2 = 0.1828.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from unbroken.training.config import DpoConfig, TrainerConfig
from unbroken.training.model.batch import Batch, ScoredRow
from unbroken.training.objective.corrections import correction_weights
from unbroken.training.objective.losses import PolicyLoss, clipped_policy_loss, k3_penalty, linear_policy_loss
from unbroken.training.objective.normalization import token_weight
from unbroken.training.objective.preferences import PairStats, dpo_loss, dpo_pull
from unbroken.types import Logprobs


class PairWeights(NamedTuple):
    """What two-phase DPO knows before the backward passes."""

    weights: list[float]
    """Of the tokens of each row, pair by pair."""
    stats: PairStats


def row_weights(
    rows: Sequence[ScoredRow], config: TrainerConfig, *, num_rows: int, num_loss_tokens: int
) -> list[float]:
    """The weight of each row's tokens; the counts are those of the update, over all processes."""
    return [
        token_weight(
            config.normalization,
            num_row_tokens=row.num_loss_tokens,
            num_rows=num_rows,
            num_loss_tokens=num_loss_tokens,
            max_row_tokens=config.max_row_tokens,
        )
        for row in rows
    ]


def pair_weights(
    pairs: Sequence[Sequence[ScoredRow]], logprobs: Sequence[Logprobs], dpo: DpoConfig, *, num_pairs: int
) -> PairWeights:
    """The weight of the tokens of each row of each pair, such that the mean of the pairs' losses is minimised.

    Args:
        pairs: the rows of each, with reference logprobs.
        logprobs: of each row of each pair in order, the current policy's, [T].
        dpo: the loss.
        num_pairs: of the update, over all processes.
    """
    current = iter(logprobs)
    margins = [sum(_signed_gap(row, next(current)) for row in rows) for rows in pairs]
    margin_P = torch.tensor(margins, dtype=torch.float64)
    pull_P = dpo_pull(margin_P, beta=dpo.beta) / num_pairs
    return PairWeights(
        weights=[pull for pull, rows in zip(pull_P.tolist(), pairs, strict=True) for _ in rows],
        stats=PairStats(
            num_pairs=len(pairs),
            num_right=int((margin_P > 0).sum()),
            margin_sum=float(dpo.beta * margin_P.sum()),
            loss_sum=float(dpo_loss(margin_P, beta=dpo.beta).sum()),
        ),
    )


def batch_loss(logprobs_N: torch.Tensor, batch: Batch, config: TrainerConfig) -> PolicyLoss:
    """The batch's part of what is minimised, given the current logprobs of its loss tokens.

    With DPO its value means nothing, only its gradient does.
    """
    penalty_N = None if batch.reference_logprobs_N is None else k3_penalty(logprobs_N, batch.reference_logprobs_N)
    if config.dpo is not None:
        loss, stats = linear_policy_loss(
            logprobs_N, batch.old_logprobs_N, batch.advantages_N, weights_N=batch.normalization_N
        )
    else:
        loss, stats = _corrected_loss(logprobs_N, batch, config)
        if penalty_N is not None:
            loss = loss + config.kl_weight * (batch.normalization_N * penalty_N).sum()
    if penalty_N is None:
        return PolicyLoss(loss, stats)
    reference_k3_sum = float(penalty_N.detach().double().sum())
    return PolicyLoss(loss, replace(stats, loss_sum=float(loss.detach()), reference_k3_sum=reference_k3_sum))


def _corrected_loss(logprobs_N: torch.Tensor, batch: Batch, config: TrainerConfig) -> PolicyLoss:
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
    return PolicyLoss(loss, replace(stats, num_corrected=int(beyond_N.sum())))


def _signed_gap(row: ScoredRow, logprobs: Logprobs) -> float:
    """The row's part of its pair's margin: the sum over loss tokens of advantage * (logprob - reference)."""
    assert row.reference_logprobs is not None, "check_reference asks for one"
    mask = row.sample.loss_mask
    gap = logprobs[mask].astype("float64") - row.reference_logprobs[mask]
    return float(row.sample.advantages[mask] @ gap)
