"""The rows that TRL trains on: one for each prompt, with exactly the given and the sampled ids.

The prompt 5 6, the sampled 7 8, a tool's answer 9, and the sampled 4 become:

    prompt_ids 5 6    completion_ids 7 8 9 4    env_mask 1 1 0 1    logprobs -.1 -.2 nan -.3

TRL takes exactly one row for each trajectory. A trajectory that cannot be trained on becomes a row with one filler id
outside the loss and no reward (`rewards`), so that its siblings' baseline is computed without it.
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
    """Why a trajectory is not trained on although its status allows it. The names are metrics, and stable."""

    FORKED = "forked"
    """It has several branches, which are several rows, but TRL takes one."""
    NOTHING_SAMPLED = "nothing_sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlRow:
    """A row for TRL, with C ids after the prompt."""

    prompt_ids: list[int]
    """The ids before the first sampled id."""
    completion_ids: list[int]
    """[C] the ids from the first sampled id to the last."""
    env_mask: list[int]
    """[C] 1 where the id was sampled and the loss covers it."""
    logprobs: list[float]
    """[C] of the sampled ids; NaN elsewhere, which TRL takes as unknown."""

    @classmethod
    def of(cls, trajectory: Trajectory, *, filler_id: int) -> TrlRow:
        """Make a trajectory's row; one filler id if it is not trained on. Raises `InvalidInputError` for images."""
        if drop_reason(trajectory) is not None:
            return cls(prompt_ids=[filler_id], completion_ids=[filler_id], env_mask=[0], logprobs=[float("nan")])
        (sample,) = _samples(trajectory)
        if sample.images:
            raise InvalidInputError(
                f"a row for TRL must hold no images, got {len(sample.images)} in trajectory "
                f"{trajectory.trajectory_id}: TRL would process the data set's images itself, differently from the "
                "engine. Use unbroken's own trainer"
            )
        start = int(np.flatnonzero(sample.sampled_mask)[0])
        return cls(
            prompt_ids=sample.token_ids[:start].tolist(),
            completion_ids=sample.token_ids[start:].tolist(),
            env_mask=sample.loss_mask[start:].astype(int).tolist(),
            logprobs=sample.rollout_logprobs[start:].tolist(),
        )


def drop_reason(trajectory: Trajectory) -> DropReason | TrajectoryStatus | None:
    """Why a trajectory is not trained on, or None if it is."""
    if trajectory.status not in TRAINABLE:
        return trajectory.status
    num_rows = len(_samples(trajectory))
    if num_rows == 0:
        return DropReason.NOTHING_SAMPLED
    return None if num_rows == 1 else DropReason.FORKED


def _samples(trajectory: Trajectory) -> list[TrainingSample]:
    return export_samples(trajectory.tree, advantage=0.0)
