"""The interface of objectives: the units that a step trains on, and the loss that its updates minimise.

TrajectoryGroups ── make_units ──► units, each trained whole in one update: a trajectory, or a pair of them
units of an update ── weigh ──► a weight for the loss tokens of each row
forward pass ── batch_loss ──► that pass's part of the loss, to call backward on
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import torch

from unbroken.counters import Counters
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.config import OldLogprobs, TrainerConfig
from unbroken.training.model.batch import Batch, ScoredRow, TrajectorySums
from unbroken.training.model.scores import Entropy, TokenScores
from unbroken.training.objective.comparison import ALONE, MIN_GROUP_SIZE, Processes
from unbroken.training.sums import Sums
from unbroken.types import BoolMask, Logprobs, TrainingSample


class ObjectiveStats(Protocol):
    """Statistics that only one objective has."""

    def __add__(self, other: Self) -> Self: ...

    def get_metrics(self) -> Mapping[str, float | None]:
        """The metrics to log."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStats(Sums):
    """Sums over loss tokens; means over tokens are properties."""

    num_tokens: int = 0
    num_clipped: int = 0
    """Tokens without gradient, whose ratio is already past the clip in the direction that the advantage pushes."""
    num_corrected: int = 0
    """Tokens that the correction truncated or masked."""
    entropy_sum: float = 0.0
    full_entropy_sum: float = 0.0
    ratio_sum: float = 0.0
    k3_sum: float = 0.0
    reference_k3_sum: float = 0.0
    loss_sum: float = 0.0
    """Each token's loss times its weight."""
    num_taught: int = 0
    """Tokens at which the loss has a teacher's most likely ids."""
    forward_kl_sum: float = 0.0
    """Over these."""

    @staticmethod
    @torch.no_grad()
    def measure(
        scores: TokenScores,
        old_logprobs_N: torch.Tensor,
        *,
        penalty_N: torch.Tensor | None,
        loss: float = 0.0,
        num_clipped: int = 0,
        num_corrected: int = 0,
    ) -> LossStats:
        """The sums of one forward pass; `penalty_N` is the k3 of the reference, if there is one."""
        log_ratio_N = (scores.logprobs_N - old_logprobs_N).double()
        entropies_N, full_N = scores.entropies_N, scores.full_entropies_N
        entropy_sum = 0.0 if entropies_N is None else float(entropies_N.double().sum())
        return LossStats(
            num_tokens=len(log_ratio_N),
            num_clipped=num_clipped,
            num_corrected=num_corrected,
            entropy_sum=entropy_sum,
            full_entropy_sum=entropy_sum if full_N is None else float(full_N.double().sum()),
            ratio_sum=float(log_ratio_N.exp().sum()),
            k3_sum=float((torch.expm1(log_ratio_N) - log_ratio_N).sum()),
            reference_k3_sum=0.0 if penalty_N is None else float(penalty_N.double().sum()),
            loss_sum=loss,
        )

    @property
    def clip_fraction(self) -> float:
        """Share of tokens that the clip left without gradient."""
        return self.num_clipped / self.num_tokens

    @property
    def corrected_fraction(self) -> float:
        """Share of tokens that the correction truncated or masked."""
        return self.num_corrected / self.num_tokens

    @property
    def entropy(self) -> float:
        """Mean entropy of the policy, in nats; over the kept ids where the sampler cut some."""
        return self.entropy_sum / self.num_tokens

    @property
    def full_entropy(self) -> float:
        """Mean entropy of the policy over the whole vocabulary, in nats."""
        return self.full_entropy_sum / self.num_tokens

    @property
    def mean_ratio(self) -> float:
        """Mean of exp(logprob - old logprob)."""
        return self.ratio_sum / self.num_tokens

    @property
    def k3(self) -> float:
        """Estimate of KL(old policy || policy): mean of ratio - 1 - log(ratio), never negative."""
        return self.k3_sum / self.num_tokens

    @property
    def reference_k3(self) -> float:
        """Estimate of KL(policy || reference): mean of k3."""
        return self.reference_k3_sum / self.num_tokens

    @property
    def forward_kl(self) -> float | None:
        """Mean of KL(teacher || policy) over the taught tokens; None without any."""
        return self.forward_kl_sum / self.num_taught if self.num_taught else None


UnitT = TypeVar("UnitT")
ScoreFn: TypeAlias = Callable[[Sequence[TrainingSample]], list[Logprobs]]
"""The current policy's logprobs of each row, [T], without gradient. With FSDP2 all processes call it together."""


class UpdateSize(NamedTuple):
    """The size of one optimizer update, over all its micro batches and processes."""

    num_units: int
    num_loss_tokens: int
    num_rows: int = 0
    """More than `num_units` if a unit has several rows; one without rows counts as one."""


class BatchLoss(NamedTuple):
    """The loss of one forward pass."""

    loss: torch.Tensor
    """Scalar, with gradient."""
    stats: LossStats


class LeftOut(NamedTuple):
    """The loss tokens of a row whose share in the loss changes; bool, [T]."""

    clipped: BoolMask
    """Without gradient or with a bounded one, by the loss's clip."""
    corrected: BoolMask
    """Truncated or masked by the correction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeights:
    """The weights of an update's rows, and statistics that are known before its forward passes."""

    weights: Sequence[float]
    """The factor of each loss token of a row; one number per row, unit by unit."""
    trajectories: Sequence[TrajectorySums | None] = ()
    """`Batch.trajectories`, one per row, unit by unit; empty if each row is a whole trajectory."""
    loss: LossStats = field(default_factory=LossStats)
    """The statistics of each forward pass are added to these."""
    stats: ObjectiveStats | None = None
    """Statistics that only this objective has."""


class Objective(ABC, Generic[UnitT]):
    """The units and the loss of training steps. An objective uses the settings of `TrainerConfig` that concern it."""

    __slots__ = ()

    unit_type: ClassVar[type[Any] | tuple[type[Any], ...]]
    """The class of its units, or several."""

    @property
    def min_group_size(self) -> int:
        """Fewest trajectories of one problem that it can learn from."""
        return MIN_GROUP_SIZE

    @abstractmethod
    def check_config(self, config: TrainerConfig) -> None:
        """Raise `InvalidInputError` if a setting has a value that this objective would ignore."""

    def try_functions(self, config: TrainerConfig, *, group_size: int, device: torch.device) -> None:
        """Call functions that may be the user's on a few numbers, in groups of this size, with tensors on `device`.

        Raises `InvalidInputError` if one fails, or returns what a step could not use.
        """
        return

    @abstractmethod
    def needs_reference(self, config: TrainerConfig) -> bool:
        """Whether rows are scored under a reference policy too."""

    @abstractmethod
    async def make_units(
        self, groups: Sequence[TrajectoryGroup], counters: Counters, config: TrainerConfig, processes: Processes = ALONE
    ) -> list[UnitT]:
        """The units to train on, in order of the groups; trajectories that give none are counted, by reason (I8).

        An objective that needs the groups of all `processes` gathers them once, in each process, also if one fails.
        """

    @abstractmethod
    def get_rows(self, unit: UnitT) -> Sequence[TrainingSample]:
        """The rows of a unit. They are trained in one update, not necessarily in one forward pass."""

    def get_idle_rows(self, unit: UnitT) -> Sequence[TrainingSample]:
        """The rows of a unit without gradient. They count in the divisor of an update, and need no forward pass."""
        return ()

    def check_units(self, units: Sequence[UnitT], config: TrainerConfig) -> None:
        """Raise `InvalidInputError` if a unit of the right type cannot be trained on."""
        return

    def changes_units(self, config: TrainerConfig) -> bool:
        """Whether units change once their rows are scored (`change_units`)."""
        return False

    def change_units(
        self,
        units: Sequence[UnitT],
        scored: Sequence[Sequence[ScoredRow]],
        config: TrainerConfig,
        processes: Processes = ALONE,
    ) -> list[list[ScoredRow]]:
        """The rows of each unit, changed by their old and reference logprobs, before a step's first update."""
        return [list(rows) for rows in scored]

    @abstractmethod
    def weigh(
        self, units: Sequence[Sequence[ScoredRow]], config: TrainerConfig, *, size: UpdateSize, score: ScoreFn
    ) -> UpdateWeights:
        """Weigh this process's rows of one update. All processes call it, also those that have no rows."""

    @abstractmethod
    def batch_loss(self, scores: TokenScores, batch: Batch, config: TrainerConfig) -> BatchLoss:
        """The loss of one forward pass, given the current policy at its N loss tokens. N may be 0."""

    def find_left_out(
        self,
        units: Sequence[Sequence[ScoredRow]],
        logprobs: Sequence[Logprobs],
        config: TrainerConfig,
        *,
        device: torch.device,
    ) -> list[LeftOut] | None:
        """What the loss would clip and correct in the rows of trajectories, all rows of each, under these logprobs, [T]
        for each row; None if it does not say so of single tokens. The loss gets its tensors on `device`.
        """
        return None

    def get_old_logprobs(self, config: TrainerConfig) -> OldLogprobs:
        """The old logprobs, whether the config has them or not."""
        return config.old_logprobs or OldLogprobs.SAMPLER

    def for_stale_rows(self, config: TrainerConfig) -> TrainerConfig:
        """The config for ids of older weights, in what it leaves open."""
        return config

    def needs_old_logprobs(self, config: TrainerConfig) -> bool:
        """Whether `OldLogprobs.RECOMPUTE` must have them before the first forward pass of the step's only update."""
        return True

    def get_entropy(self, config: TrainerConfig) -> Entropy:
        """Whether the entropies in `batch_loss` have a gradient."""
        return Entropy.MEASURED

    def get_metrics(self, units: Sequence[UnitT]) -> Mapping[str, float | None]:
        """The metrics of a step's units, before they are trained on; with the same names if there are none."""
        return {}

    def can_lack_variance(self, config: TrainerConfig) -> bool:
        """Whether a group by itself can teach nothing, so that another can replace it (`has_variance`)."""
        return False

    def has_variance(self, group: TrajectoryGroup, config: TrainerConfig) -> bool:
        """Whether a group has advantages, or too few members to say."""
        return True
