"""What TRL trains on: one row for each prompt that it gave, of ids exactly as they were given and sampled.

Worked example: the prompt 5 6, the sampled 7 8, a tool's answer 9, and the sampled 4.

    prompt_ids 5 6    completion_ids 7 8 9 4    env_mask 1 1 0 1    logprobs -.1 -.2 nan -.3

TRL has one row for a trajectory, no more and no less. One that cannot be trained on leaves a row that teaches nothing:
a filler id, which no loss covers, and no reward (`rewards`), so that its siblings' baseline is taken without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from unbroken.errors import InvalidInputError
from unbroken.ledger.export import export_samples
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.training.objective.samples import TRAINABLE
from unbroken.types import TrainingSample


class DropReason(StrEnum):
    """Why a trajectory with an ending that allows training is not trained on. Stable names: they are metrics."""

    FORKED = "forked"
    """It has several branches, which are several rows: TRL has room for one."""
    NOTHING_SAMPLED = "nothing_sampled"
    """It holds no sampled id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlRow:
    """One row as TRL takes it; C ids after the prompt."""

    prompt_ids: list[int]
    """Up to the first sampled id."""
    completion_ids: list[int]
    """[C] the rest, to the last sampled id."""
    env_mask: list[int]
    """[C] 1 where the id was sampled and the loss covers it."""
    logprobs: list[float]
    """[C] of the sampled ids, NaN elsewhere, which TRL takes as unknown."""

    @classmethod
    def of(cls, trajectory: Trajectory, *, filler_id: int) -> TrlRow:
        """The row of a trajectory; one filler id where it is not trained on.

        Raises:
            InvalidInputError: it holds images.
        """
        if drop_reason(trajectory) is not None:
            return cls(prompt_ids=[filler_id], completion_ids=[filler_id], env_mask=[0], logprobs=[float("nan")])
        (sample,) = _samples(trajectory)
        if sample.images:
            raise InvalidInputError(
                f"a row for TRL must hold no images, got {len(sample.images)} in trajectory "
                f"{trajectory.trajectory_id}: TRL would process the data set's images by itself, and not as they were "
                "sampled with. Use unbroken's own trainer"
            )
        start = int(np.flatnonzero(sample.sampled_mask)[0])
        return cls(
            prompt_ids=sample.token_ids[:start].tolist(),
            completion_ids=sample.token_ids[start:].tolist(),
            env_mask=sample.loss_mask[start:].astype(int).tolist(),
            logprobs=sample.rollout_logprobs[start:].tolist(),
        )


def drop_reason(trajectory: Trajectory) -> DropReason | TrajectoryStatus | None:
    """Why a trajectory is not trained on; None if it is."""
    if trajectory.status not in TRAINABLE:
        return trajectory.status
    num_rows = len(_samples(trajectory))
    if num_rows == 0:
        return DropReason.NOTHING_SAMPLED
    return None if num_rows == 1 else DropReason.FORKED


def _samples(trajectory: Trajectory) -> list[TrainingSample]:
    return export_samples(trajectory.tree, advantage=0.0)
