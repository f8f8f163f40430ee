"""The interface of objectives: the units that a step trains on, and the loss that its updates minimise.

TrajectoryGroups ── make_units ──► units, each trained whole in one update: a trajectory, or a pair of them
units of an update ── weigh ──► a weight for the loss tokens of each row
forward pass ── batch_loss ──► that pass's part of the loss, to call backward on
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import torch

from unbroken.counters import Counters
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.training.config import TrainerConfig
from unbroken.training.model.batch import Batch, ScoredRow
from unbroken.training.objective.loss_stats import LossStats, ObjectiveStats
from unbroken.types import Logprobs, TrainingSample

UnitT = TypeVar("UnitT")
ScoreFn: TypeAlias = Callable[[Sequence[TrainingSample]], list[Logprobs]]
"""The current policy's logprobs of each row, [T], without gradient. With FSDP2 all processes call it together."""


class UpdateSize(NamedTuple):
    """The size of one optimizer update, over all its micro batches and processes."""

    num_units: int
    num_loss_tokens: int


class BatchLoss(NamedTuple):
    """The loss of one forward pass."""

    loss: torch.Tensor
    """Scalar, with gradient."""
    stats: LossStats


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeights:
    """The weights of an update's rows, and statistics that are known before its forward passes."""

    weights: Sequence[float]
    """The factor of each loss token of a row; one number per row, unit by unit."""
    loss: LossStats = field(default_factory=LossStats)
    """The statistics of each forward pass are added to these."""
    stats: ObjectiveStats | None = None
    """Statistics that only this objective has."""


class Objective(ABC, Generic[UnitT]):
    """The units and the loss of training steps. An objective uses the settings of `TrainerConfig` that concern it."""

    __slots__ = ()

    unit_type: ClassVar[type[Any] | tuple[type[Any], ...]]
    """The class of its units, or several."""

    @abstractmethod
    def check_config(self, config: TrainerConfig) -> None:
        """Raise `InvalidInputError` if a setting has a value that this objective would ignore."""

    @abstractmethod
    def needs_reference(self, config: TrainerConfig) -> bool:
        """Whether rows are scored under a reference policy too."""

    @abstractmethod
    async def make_units(
        self, groups: Sequence[TrajectoryGroup], counters: Counters, config: TrainerConfig
    ) -> list[UnitT]:
        """The units to train on, in order of the groups; trajectories that give none are counted, by reason (I8)."""

    @abstractmethod
    def get_rows(self, unit: UnitT) -> Sequence[TrainingSample]:
        """The rows of a unit. They are trained in one update, not necessarily in one forward pass."""

    @abstractmethod
    def weigh(
        self, units: Sequence[Sequence[ScoredRow]], config: TrainerConfig, *, size: UpdateSize, score: ScoreFn
    ) -> UpdateWeights:
        """Weigh this process's rows of one update. All processes call it, also those that have no rows."""

    @abstractmethod
    def batch_loss(self, logprobs_N: torch.Tensor, batch: Batch, config: TrainerConfig) -> BatchLoss:
        """The loss of one forward pass, given the current logprobs of its N loss tokens. N may be 0."""

    def get_metrics(self, units: Sequence[UnitT]) -> Mapping[str, float | None]:
        """The metrics of a step's units, before they are trained on; with the same names if there are none."""
        return {}

    def find_zero_variance(self, groups: Sequence[TrajectoryGroup], config: TrainerConfig) -> list[Trajectory]:
        """Trajectories left out because their group's rewards are equal, to measure their mismatch."""
        return []
