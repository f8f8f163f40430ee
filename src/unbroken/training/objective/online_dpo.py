"""Online DPO: pairs of a better and a worse trajectory, and their loss against a reference (arXiv:2402.04792).

A pair's two trajectories share one loss, and their rows need not fit one forward pass. So the margins are computed
first, without gradient. The loss of a pair is a function f of its margin alone, and the margin is a sum of logprobs
with the signs of the advantages (1 chosen, -1 rejected), so by the chain rule the gradient is exactly

    sum over loss tokens of  f'(margin) * advantage * gradient of the logprob

a weighted sum over rows, with one weight for all rows of a pair. It costs one more forward pass of each row, and no
more memory than a row. Worked example, two pairs, beta 0.5, margins 2 and -2: the weights are
0.5 * sigmoid(-1) / 2 = 0.0672 and 0.5 * sigmoid(1) / 2 = 0.1828.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional

from unbroken.counters import Counters
from unbroken.errors import InvalidInputError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.config import TrainerConfig
from unbroken.training.loss_config import DpoConfig
from unbroken.training.model.batch import Batch, ScoredRow
from unbroken.training.model.scores import TokenScores
from unbroken.training.objective.base import BatchLoss, LossStats, Objective, ScoreFn, UpdateSize, UpdateWeights
from unbroken.training.objective.comparison import ALONE, Processes
from unbroken.training.objective.losses import k3
from unbroken.training.objective.pairs import Judge, PairFn, PreferencePair, best_and_worst, build_pairs
from unbroken.training.sums import Sums
from unbroken.types import Logprobs, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineDpo(Objective[PreferencePair]):
    """Learns from pairs of a group's trajectories."""

    unit_type: ClassVar = PreferencePair

    judge: Judge | None = None
    """None: a trajectory's reward is its score."""
    pairs: PairFn = best_and_worst

    def check_config(self, config: TrainerConfig) -> None:
        """Raise `InvalidInputError` if a setting of the policy gradient is not its default."""
        unused = TrainerConfig()
        names = ("clip", "normalization", "max_trajectory_tokens", "correction", "kl_weight", "kl", "overlong")
        others = ("truncated", "zero_variance", "failed", "failed_reward", "entropy_weight", "entropy_control")
        for name in (*names, *others, "teacher_weight"):
            if (value := getattr(config, name)) != getattr(unused, name):
                raise InvalidInputError(
                    f"TrainerConfig.{name} must be left out with OnlineDpo, which does not use it, got {value!r}"
                )

    def needs_reference(self, config: TrainerConfig) -> bool:
        """Always."""
        return True

    async def make_units(
        self, groups: Sequence[TrajectoryGroup], counters: Counters, config: TrainerConfig, processes: Processes = ALONE
    ) -> list[PreferencePair]:
        """Build the pairs (`build_pairs`)."""
        return await build_pairs(groups, counters, judge=self.judge, pairs=self.pairs)

    def get_rows(self, unit: PreferencePair) -> Sequence[TrainingSample]:
        """The chosen trajectory's rows, then the rejected one's."""
        return unit.rows

    def get_metrics(self, units: Sequence[PreferencePair]) -> Mapping[str, float | None]:
        """The mean difference of the scores of this process's pairs."""
        return {"dpo/score_margin": float(np.mean([pair.score_margin for pair in units])) if units else None}

    def weigh(
        self, units: Sequence[Sequence[ScoredRow]], config: TrainerConfig, *, size: UpdateSize, score: ScoreFn
    ) -> UpdateWeights:
        """Weigh each pair such that the mean of the pairs' losses is minimised."""
        beta = (config.dpo or DpoConfig()).beta
        current = iter(score([row.sample for rows in units for row in rows]))
        margins = [sum(_signed_gap(row, next(current)) for row in rows) for rows in units]
        margin_P = torch.tensor(margins, dtype=torch.float64)
        pull_P = dpo_pull(margin_P, beta=beta) / size.num_units
        stats = PairStats(
            num_pairs=len(units),
            num_right=int((margin_P > 0).sum()),
            margin_sum=float(beta * margin_P.sum()),
            loss_sum=float(dpo_loss(margin_P, beta=beta).sum()),
        )
        return UpdateWeights(
            weights=[pull for pull, rows in zip(pull_P.tolist(), units, strict=True) for _ in rows],
            loss=LossStats(loss_sum=stats.loss_sum / size.num_units),
            stats=stats,
        )

    def batch_loss(self, scores: TokenScores, batch: Batch, config: TrainerConfig) -> BatchLoss:
        """The sum of -weight * advantage * logprob; only its gradient has a meaning, so the statistics omit it."""
        logprobs_N = scores.logprobs_N
        loss = -(batch.weights_N * batch.advantages_N * logprobs_N).sum()
        penalty_N = None
        if batch.reference_logprobs_N is not None:
            penalty_N = k3(logprobs_N.detach(), batch.reference_logprobs_N)
        stats = LossStats.measure(scores, batch.old_logprobs_N, penalty_N=penalty_N)
        return BatchLoss(loss, stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStats(Sums):
    """Sums over pairs, before their update; means are properties."""

    num_pairs: int = 0
    num_right: int = 0
    """Pairs with a margin above 0: the policy has moved from the reference in the direction of the scores."""
    margin_sum: float = 0.0
    """Of beta * margin, the difference of implicit rewards."""
    loss_sum: float = 0.0

    @property
    def accuracy(self) -> float:
        """Share of pairs with a margin above 0."""
        return self.num_right / self.num_pairs

    @property
    def margin(self) -> float:
        """Mean of beta * margin."""
        return self.margin_sum / self.num_pairs

    def get_metrics(self) -> Mapping[str, float | None]:
        """The metrics to log."""
        return {"dpo/num_pairs": self.num_pairs, "dpo/margin": self.margin, "dpo/accuracy": self.accuracy}


def dpo_loss(margin_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """[P] the loss of each pair: -log sigmoid(beta * margin) (DPO, arXiv:2305.18290).

    A pair's margin is (c - r) - (c_ref - r_ref): how much more than the reference the policy prefers the chosen to the
    rejected, each the sum of the logprobs of all ids that a trajectory sampled. Worked example, beta 0.5: the policy
    prefers by 1, the reference by -1, so the margin is 2 and the loss -log sigmoid(1) = 0.3133.
    """
    return -functional.logsigmoid(beta * margin_P)


def dpo_pull(margin_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """[P] minus the derivative of `dpo_loss` by the margin: beta * sigmoid(-beta * margin). It pulls each chosen id's
    logprob up, and each rejected id's down. For the margin 2 and beta 0.5 it is 0.5 * sigmoid(-1) = 0.1345.
    """
    return beta * torch.sigmoid(-beta * margin_P)


def _signed_gap(row: ScoredRow, logprobs: Logprobs) -> float:
    """The row's part of its pair's margin: the sum over loss tokens of advantage * (logprob - reference)."""
    assert row.reference_logprobs is not None, "check_reference asks for one"
    mask = row.sample.loss_mask
    gap = logprobs[mask].astype("float64") - row.reference_logprobs[mask]
    return float(row.sample.advantages[mask] @ gap)
