"""The groups of each step: problems by number, seeds that follow from the number, and each process its share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from unbroken.engines.base import Engine
from unbroken.errors import CheckpointError, InvalidInputError
from unbroken.runs.config import RolloutConfig
from unbroken.rendering.base import Renderer
from unbroken.rollout.env import Env
from unbroken.rollout.runner import run_group
from unbroken.rollout.trajectory import TrajectoryGroup

MakeEnv: TypeAlias = Callable[[int], Env]
"""A problem's number, from 0 and without an end, to a fresh environment: the same problem whenever it is asked."""
Score: TypeAlias = Callable[[int, TrajectoryGroup], Awaitable[TrajectoryGroup]]
"""A problem's number and its group to the group with the rewards that count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """What to train on, or to measure on: problem number 0, 1, 2 and so on, without an end."""

    env: MakeEnv
    score: Score | None = None
    """Rewards that need a whole group; without it, those of the environments count."""
    source: str = ""
    """What the problems are taken from, in words: a run goes on only with the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Which of several processes this is."""

    index: int = 0
    num_processes: int = 1

    def of(self, numbers: Sequence[int]) -> Sequence[int]:
        """The part of this process in what all of them do together."""
        return numbers[self.index :: self.num_processes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Plays groups of one problem, each with a seed that follows from `seed` and the problem's number."""

    engine: Engine
    renderer: Renderer
    config: RolloutConfig
    problems: Problems
    seed: tuple[int, ...]
    """Of all groups; other than that of every other sampler of the run."""

    async def groups(self, numbers: Sequence[int], *, size: int) -> list[TrajectoryGroup]:
        """The groups of these problems, all at once; the first error ends them all."""
        try:
            async with asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(self.group(number, size=size)) for number in numbers]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [group.result() for group in groups]

    async def group(self, number: int, *, size: int) -> TrajectoryGroup:
        """`size` trajectories of one problem, all at once."""
        own = self.config.sampling.seed
        entropy = [*self.seed, number] if own is None else [*self.seed, number, own]
        group = await run_group(
            lambda: self.problems.env(number),
            size,
            engine=self.engine,
            renderer=self.renderer,
            sampling=replace(self.config.sampling, seed=int(np.random.SeedSequence(entropy).generate_state(1)[0])),
            limits=self.config.limits,
            group_id="-".join(map(str, [*self.seed, number])),
        )
        return group if self.problems.score is None else await self.problems.score(number, group)


class Collector:
    """Collects the groups of one step after the other; resumable, since its whole state is a number.

    Worked example, 4 problems a step and 2 processes: step 0 is problems 0 and 2 for the first process, 1 and 3 for
    the second; step 1 is 4 and 6, 5 and 7.
    """

    def __init__(self, sampler: Sampler, *, share: Share | None = None) -> None:
        """Begin with problem 0.

        Raises:
            InvalidInputError: there are more processes than problems in a step.
        """
        self._sampler = sampler
        self._share = share or Share()
        self._source = sampler.problems.source
        self._next = 0
        num_problems = sampler.config.problems_per_step
        if num_problems < self._share.num_processes:
            raise InvalidInputError(
                f"rollouts.problems_per_step must be at least the number of processes, {self._share.num_processes}, "
                f"got {num_problems}"
            )

    async def __call__(self) -> list[TrajectoryGroup]:
        """Sample this process's groups of the next step, all at once."""
        config = self._sampler.config
        numbers = range(self._next, self._next + config.problems_per_step)
        groups = await self._sampler.groups(self._share.of(numbers), size=config.group_size)
        self._next = numbers.stop
        return groups

    def state(self) -> Mapping[str, Any]:
        """See `Resumable`."""
        return {"next_problem": self._next, "source": self._source}

    def restore(self, state: Mapping[str, Any], /) -> None:
        """See `Resumable`.

        Raises:
            CheckpointError: the problems were of another source.
        """
        if state["source"] != self._source:
            raise CheckpointError(
                f"the run was begun with {state['source']} and cannot go on with {self._source}: give it the same data"
            )
        self._next = state["next_problem"]
