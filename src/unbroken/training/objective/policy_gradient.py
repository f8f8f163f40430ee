"""The policy gradient: advantages from the rewards of a group, a loss for each token, the distance to a reference.

    sum over loss tokens of  weight * (correction * policy loss + kl_weight * k3)

The correction does not apply to the reference term. A token that it masks still counts in the weights, so masking makes
an update smaller, and not its other tokens larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from unbroken.counters import Counters
from unbroken.errors import InvalidInputError
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.training.config import TrainerConfig
from unbroken.training.model.batch import Batch, ScoredRow
from unbroken.training.objective.advantages import AdvantageFn, StepAdvantages, grpo_advantages
from unbroken.training.objective.base import BatchLoss, Objective, ScoreFn, UpdateSize, UpdateWeights
from unbroken.training.objective.corrections import correction_weights
from unbroken.training.objective.loss_stats import LossStats
from unbroken.training.objective.losses import PolicyLossFn, clipped
from unbroken.training.objective.normalization import token_weight
from unbroken.training.objective.reference import k3_penalty
from unbroken.training.objective.samples import TrajectoryRows, build_trajectories, find_zero_variance_members
from unbroken.types import TrainingSample


@dataclass(frozen=True, slots=True)
class PolicyGradient(Objective[TrainingSample | TrajectoryRows]):
    """GRPO, RLOO and their relatives: an advantage function and a loss."""

    unit_type: ClassVar = (TrainingSample, TrajectoryRows)
    """A row by itself is a trajectory of one row."""

    advantages: AdvantageFn | StepAdvantages = grpo_advantages
    loss: PolicyLossFn = clipped
    """One of `losses.LOSSES`, or your own."""

    def check_config(self, config: TrainerConfig) -> None:
        """Raise `InvalidInputError` if there are settings for DPO."""
        if config.dpo is not None:
            raise InvalidInputError(f"TrainerConfig.dpo must be None with PolicyGradient, got {config.dpo}")

    def needs_reference(self, config: TrainerConfig) -> bool:
        """Whether `kl_weight` is above 0."""
        return config.kl_weight > 0

    async def make_units(
        self, groups: Sequence[TrajectoryGroup], counters: Counters, config: TrainerConfig
    ) -> list[TrainingSample | TrajectoryRows]:
        """Build each trajectory's rows (`build_trajectories`).

        With a reference, groups whose rewards are all equal and unscored trajectories keep their distance to it in the
        loss, as in TRL.
        """
        keep = self.needs_reference(config)
        return [*build_trajectories(groups, self.advantages, counters, keep_zero_advantage=keep)]

    def get_rows(self, unit: TrainingSample | TrajectoryRows) -> Sequence[TrainingSample]:
        """The rows of the trajectory."""
        return unit.rows if isinstance(unit, TrajectoryRows) else (unit,)

    def find_zero_variance(self, groups: Sequence[TrajectoryGroup], config: TrainerConfig) -> list[Trajectory]:
        """The trainable members of groups whose rewards are all equal, if they are not trained on."""
        return [] if self.needs_reference(config) else find_zero_variance_members(groups)

    def weigh(
        self, units: Sequence[Sequence[ScoredRow]], config: TrainerConfig, *, size: UpdateSize, score: ScoreFn
    ) -> UpdateWeights:
        """Weigh the rows of each trajectory by `config.normalization`."""
        weights = [
            token_weight(
                config.normalization,
                num_trajectory_tokens=sum(row.num_loss_tokens for row in rows),
                num_trajectories=size.num_units,
                num_loss_tokens=size.num_loss_tokens,
                max_trajectory_tokens=config.max_trajectory_tokens,
            )
            for rows in units
        ]
        return UpdateWeights(weights=[weight for weight, rows in zip(weights, units, strict=True) for _ in rows])

    def batch_loss(self, logprobs_N: torch.Tensor, batch: Batch, config: TrainerConfig) -> BatchLoss:
        """The weighted sum of the tokens' losses and of their distance to the reference, if there is one.

        If weights add up to 1 over all micro batches and processes of the update, the sum is a mean, however the rows
        were split. Raises `InvalidInputError` if shapes differ.
        """
        tensors = (logprobs_N, batch.old_logprobs_N, batch.advantages_N, batch.weights_N)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len(set(shapes)) != 1 or len(shapes[0]) != 1:
            raise InvalidInputError(
                f"logprobs, old_logprobs, advantages and weights must share one shape [N], got {shapes}"
            )
        correction_N, corrected_N = correction_weights(
            batch.old_logprobs_N, batch.rollout_logprobs_N, batch.num_row_tokens, config.correction
        )
        losses_N, clipped_N = self.loss(logprobs_N, batch, config.clip)
        loss = (batch.weights_N * correction_N * losses_N).sum()
        penalty_N = None
        if batch.reference_logprobs_N is not None:
            penalty_N = k3_penalty(logprobs_N, batch.reference_logprobs_N)
            loss = loss + config.kl_weight * (batch.weights_N * penalty_N).sum()
        stats = LossStats.measure(
            logprobs_N,
            batch.old_logprobs_N,
            penalty_N=penalty_N,
            loss=float(loss.detach()),
            num_clipped=int(clipped_N.sum()),
            num_corrected=int(corrected_N.sum()),
        )
        return BatchLoss(loss, stats)
