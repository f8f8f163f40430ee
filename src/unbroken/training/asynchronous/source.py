"""The protocol of what the asynchronous loop samples: one group at a time, by its number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from unbroken.rollout.trajectory import TrajectoryGroup


@runtime_checkable
class GroupSource(Protocol):
    """The groups of one process, numbered 0, 1, 2, ... without end; each is trained once (`runs.collector.Collector`).

    Several are sampled at the same time, and not always in their order. A number whose group was cancelled or lost, or
    was in flight when the run was killed, is asked for again: it stands for the same problem.
    """

    @property
    def groups_per_step(self) -> int:
        """Number of this process's groups in a step, at least 1."""
        ...

    async def sample(self, number: int) -> TrajectoryGroup:
        """Sample the group with this number, with the weights that the engine then has.

        A call that is cancelled aborts its requests and closes its environments.
        """
        ...


@runtime_checkable
class ChoosingSource(GroupSource, Protocol):
    """A source that chooses a number's problem when it is first asked for it, by the groups so far.

    What it has chosen is in checkpoints: after a kill, what was in flight is sampled again, of the same problem.
    """

    def tell(self, number: int, group: TrajectoryGroup) -> None:
        """Record that a number's group was trained or replaced. Called once for each number."""
        ...

    def choices(self) -> Mapping[str, Any]:
        """The problems of numbers that were not recorded yet, and its own state, in types that JSON can hold."""
        ...

    def restore_choices(self, choices: Mapping[str, Any], /) -> None:
        """Go on from what `choices` returned."""
        ...
