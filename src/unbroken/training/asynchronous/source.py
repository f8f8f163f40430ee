"""The protocol of what the asynchronous loop samples: one group at a time, by its number."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

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
