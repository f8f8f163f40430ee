"""Supervised rows: the mean over their loss tokens of -logprob, which is the cross-entropy of transformers and TRL.

A row has the ids of a conversation, and its loss mask those that the model would have written. No policy sampled them:
their logprobs and versions are stand-ins (0), which this loss does not read. Worked example, two rows of one update:

    logprobs of the loss tokens    -1 -2 | -3        weight of each token 1/3        loss (1 + 2 + 3) / 3 = 2

They are computed at temperature 1, in passes of their own, whatever the rollouts of the same update were sampled at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unbroken.counters import Counters
from unbroken.errors import InvalidInputError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.config import TrainerConfig
from unbroken.training.model.batch import Batch, ScoredRow
from unbroken.training.model.scores import Entropy, TokenScores
from unbroken.training.objective.base import BatchLoss, LossStats, Objective, ScoreFn, UpdateSize, UpdateWeights
from unbroken.training.objective.comparison import ALONE, Processes
from unbroken.training.sums import Sums
from unbroken.types import NO_VERSION, BoolMask, TokenIds, TrainingSample


def make_supervised_row(token_ids: TokenIds, loss_mask: BoolMask) -> TrainingSample:
    """A row whose ids were given, with stand-ins for what only sampled ids have."""
    return TrainingSample(
        token_ids=token_ids,
        sampled_mask=loss_mask,
        loss_mask=loss_mask,
        rollout_logprobs=np.where(loss_mask, 0, np.nan).astype(np.float32),
        policy_versions=np.where(loss_mask, 0, NO_VERSION).astype(np.int32),
        advantages=np.zeros(len(loss_mask), dtype=np.float32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised(Objective[TrainingSample]):
    """Learns to write what supervised rows have: alone, or beside another objective in the same updates."""

    unit_type: ClassVar = TrainingSample

    weight: float = 1.0
    """The factor of the mean, beside another objective."""

    def check_config(self, config: TrainerConfig) -> None:
        """Accept every config: the settings of the loss are those of the other objective."""

    def needs_reference(self, config: TrainerConfig) -> bool:
        """Never."""
        return False

    def get_entropy(self, config: TrainerConfig) -> Entropy:
        """Not computed."""
        return Entropy.NONE

    async def make_units(
        self, groups: Sequence[TrajectoryGroup], counters: Counters, config: TrainerConfig, processes: Processes = ALONE
    ) -> list[TrainingSample]:
        """Raise `InvalidInputError`: its rows are not those of rollouts."""
        raise InvalidInputError("Supervised has no units of rollouts: give its rows to Trainer.supervise")

    def get_rows(self, unit: TrainingSample) -> Sequence[TrainingSample]:
        """The row itself."""
        return (unit,)

    def weigh(
        self, units: Sequence[Sequence[ScoredRow]], config: TrainerConfig, *, size: UpdateSize, score: ScoreFn
    ) -> UpdateWeights:
        """The same for each loss token of all processes."""
        return UpdateWeights(weights=[self.weight / size.num_loss_tokens] * sum(map(len, units)))

    def batch_loss(self, scores: TokenScores, batch: Batch, config: TrainerConfig) -> BatchLoss:
        """The sum of -weight * logprob."""
        loss = -(batch.weights_N * scores.logprobs_N).sum()
        return BatchLoss(loss, LossStats(num_tokens=batch.num_loss_tokens, loss_sum=float(loss.detach())))


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedStats(Sums):
    """Sums over the supervised rows of updates, each before its update."""

    num_rows: int = 0
    num_tokens: int = 0
    """Ids in the rows, prompts included."""
    num_loss_tokens: int = 0
    nll_sum: float = 0.0
    """Of -logprob, without a weight."""

    @property
    def loss(self) -> float:
        """The mean over the loss tokens of -logprob."""
        return self.nll_sum / self.num_loss_tokens

    def get_metrics(self) -> Mapping[str, float | None]:
        """The metrics to log."""
        return {
            "supervised/loss": self.loss,
            "supervised/num_rows": self.num_rows,
            "supervised/num_tokens": self.num_tokens,
            "supervised/num_loss_tokens": self.num_loss_tokens,
        }
