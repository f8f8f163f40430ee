"""The mismatch of what is not trained: of groups whose rewards are all equal, so that every advantage is zero.

Trained rows alone would tell of a part of what was sampled, and of none of it once a task is solved. Some of the others
are scored before the update, and weigh in `mismatch/kl` by their number of ids:

    trained     300 ids, k3 2e-7
    unvaried    100 ids, of which 40 were scored: k3 6e-7      mismatch/kl = (300 * 2e-7 + 100 * 6e-7) / 400 = 3e-7
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unbroken.ledger.export import export_samples
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.training.metrics.mismatch import Mismatch, mismatch
from unbroken.training.metrics.writer import Metrics
from unbroken.training.objective.advantages import all_equal
from unbroken.training.objective.samples import MIN_GROUP_SIZE, trainable
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Unvaried:
    """What was sampled in these groups, over all processes."""

    num_tokens: int
    """Loss tokens they would have had."""
    scored: Mismatch | None
    """Trainer against sampler on those that were scored."""

    def metrics(self, trained: Metrics) -> Metrics:
        """What to log beside the numbers of the rows that were trained."""
        num_trained, k3 = trained["train/num_loss_tokens"] or 0, trained["mismatch/k3"] or 0.0
        all_k3: float | None = k3
        if self.num_tokens > 0:
            all_k3 = None
            if self.scored is not None:
                all_k3 = (num_trained * k3 + self.num_tokens * self.scored.k3) / (num_trained + self.num_tokens)
        return {
            "mismatch/kl": all_k3,
            "mismatch/num_unvaried_tokens": self.num_tokens,
            "mismatch/unvaried_k3": None if self.scored is None else self.scored.k3,
            "mismatch/unvaried_max_abs": None if self.scored is None else self.scored.max_abs,
        }


def compare_unvaried(trainer: Trainer, groups: Sequence[TrajectoryGroup], *, num_scored: int) -> Unvaried:
    """Score up to `num_scored` trajectories of each process under the trainer's weights, which every process calls.

    Blocks for as long as a forward pass over them takes. Raises as `Trainer.logprobs` does.
    """
    rows = [_rows(member) for member in unvaried_members(groups)]
    chosen = [row for of_member in _spread(rows, num_scored) for row in of_member]
    pairs = [_loss_tokens(row, of_row) for row, of_row in zip(chosen, _logprobs(trainer, chosen), strict=True)]
    num_tokens = sum(int(row.loss_mask.sum()) for of_member in rows for row in of_member)
    everyone = trainer.from_all_processes((num_tokens, pairs))
    seen = [pair for _, of_process in everyone for pair in of_process]
    scored = mismatch(*(np.concatenate(side) for side in zip(*seen, strict=True))) if seen else None
    return Unvaried(num_tokens=sum(of_process for of_process, _ in everyone), scored=scored)


def unvaried_members(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    """The members to compare of each group in which all of them have one reward, up to rounding."""
    compared = [members for group in groups if len(members := trainable(group)) >= MIN_GROUP_SIZE]
    return [
        member
        for members in compared
        if all_equal(np.array([each.reward for each in members], dtype=np.float64))
        for member in members
    ]


def _rows(member: Trajectory) -> list[TrainingSample]:
    return export_samples(member.tree, 0.0)


def _logprobs(trainer: Trainer, rows: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
    return trainer.logprobs(rows) if trainer.in_any_process(bool(rows)) else []


def _loss_tokens(row: TrainingSample, logprobs: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """[N] of the trainer and [N] of the sampler."""
    return logprobs[row.loss_mask], row.rollout_logprobs[row.loss_mask]


def _spread(rows: Sequence[list[TrainingSample]], num: int) -> Sequence[list[TrainingSample]]:
    """Up to `num` of them, evenly spread."""
    return rows[:: max(1, math.ceil(len(rows) / num))] if num > 0 else []
