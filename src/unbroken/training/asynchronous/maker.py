"""What the asynchronous loop asks of a trainer and its publisher, all of it awaitable: a simulation can be one too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from unbroken.errors import EngineError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.sums import Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCounts(Sums):
    """What became of the groups of a process that were not trained, since the step before."""

    num_cancelled: int = 0
    """In flight, too old for the next step."""
    num_dropped: int = 0
    """Finished, too old for the next step."""
    num_lost: int = 0
    """Their engine went away."""
    num_cancelled_ids: int = 0
    """Sampled ids, of turns that had ended."""
    num_dropped_ids: int = 0
    num_lost_ids: int = 0
    """Sampled ids, of turns that had ended."""
    num_queued: int = 0
    """Finished groups that were left when the step's groups were taken."""
    num_in_flight: int = 0
    """Groups that were being sampled then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenGroups:
    """The groups of this process for one step."""

    step: int
    """From 0."""
    groups: Sequence[TrajectoryGroup]
    counts: SamplerCounts
    waited_s: float
    """How long the trainer waited for them."""
    since_last_s: float
    """Since the groups of the step before were taken, or the loop began."""
    numbers: Mapping[str, Any]
    """Which groups are trained after this step, for the checkpoint (`GroupNumbers.state`)."""
    replaced: Sequence[TrajectoryGroup] = ()
    """Groups whose rewards are all equal, instead of which others were sampled since the step before."""


class FindsLoss(Protocol):
    """Tells groups that an engine lost from those that can be used. It communicates with no other process."""

    async def find_loss(self, groups: Sequence[TrajectoryGroup], *, oldest_version: int) -> EngineError | None:
        """The error if the engine went away, or has ids older than `oldest_version`; None if the groups can be used."""
        ...

    async def is_outage(self, error: EngineError) -> bool:
        """Whether an error says that the engine went away; otherwise it refused a request."""
        ...


class StepMaker(FindsLoss, Protocol):
    """Makes steps, and publishes their weights. With several processes, each has one, and they call it together: in the
    same order, but for `find_loss`, `is_outage` and `publish`, which wait for no other process.
    """

    @property
    def policy_version(self) -> int:
        """The version of the trainer's weights."""
        ...

    async def agree(self, *, is_lost: bool, failure: Exception | None) -> bool:
        """Return whether any process has lost its engine; a failure of one is raised in all."""
        ...

    async def recover(self, lost: EngineError | None) -> None:
        """Wait until the engines are back, and publish the trainer's weights to them.

        Raises:
            OutageError: they stayed away, or there is nothing to wait for.
        """
        ...

    async def make_step(self, taken: TakenGroups) -> None:
        """Train on the groups, and write a checkpoint if one is due. The version rises unless nothing was trained."""
        ...

    async def snapshot(self) -> Any:
        """A copy of the trainer's weights, for `publish`; None in a process that publishes none."""
        ...

    async def publish(self, snapshot: Any, *, policy_version: int) -> bool:
        """Publish a snapshot, and return whether this process's engine has it now. It may run beside `make_step`.

        Without a snapshot another process publishes; if it fails, that is known at the next agreement.

        Raises:
            EngineError: an engine is gone, or did not take it.
        """
        ...

    def needs_engine(self, step: int) -> bool:
        """Whether `end_step` needs an engine with the step's weights, as an evaluation does."""
        ...

    async def end_step(self, step: int) -> None:
        """Write the step's metrics, and do what comes after it."""
        ...
