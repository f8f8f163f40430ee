"""Curricula: which problem comes next, chosen by the results of the groups so far.

    class EasyFirst:                                    # problems 0 .. n-1, the easiest of those seen
        def choose(self) -> int: ...
        def tell(self, problem: int, group: TrajectoryGroup) -> None: ...
        def state(self) -> Mapping[str, Any]: ...       # for checkpoints
        def restore(self, state: Mapping[str, Any]) -> None: ...

    def make(part: CurriculumPart) -> EasyFirst: ...    # --curriculum my_curriculum.py:make

The loops count groups: 0, 1, 2, ... in each process. A group's problem is chosen once, when the group is first sampled;
if it is cancelled, lost or killed, it is sampled again of the same problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from unbroken.errors import InvalidInputError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.collector import Collector, Sampler
from unbroken.runs.processes import Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumPart:
    """The part of the problems that one process trains on: the numbers 0, 1, 2, ... of its own."""

    num_problems: int | None
    """How many different problems it has; None: without end. Greater numbers are those again, in another order."""
    seed: int
    """The run's."""
    rank: Rank

    def get_problem(self, number: int) -> int:
        """The run's number of a problem of this part: no other process has it."""
        return number * self.rank.num_processes + self.rank.index

    @staticmethod
    def of(num_problems: int | None, *, seed: int, rank: Rank) -> CurriculumPart:
        """The part of a process, of `num_problems` of all."""
        own = None if num_problems is None else len(rank.select(range(num_problems)))
        if own == 0:
            raise InvalidInputError(
                f"curriculum must have a problem for each of {rank.num_processes} processes, and the data has "
                f"{num_problems}"
            )
        return CurriculumPart(num_problems=own, seed=seed, rank=rank)


class Curriculum(Protocol):
    """Chooses the problems of one process. Its methods are called one after the other, and should return at once."""

    def choose(self) -> int:
        """The number of the next problem in this process's part; it may be one that was chosen before."""
        ...

    def tell(self, problem: int, group: TrajectoryGroup, /) -> None:
        """Take note of a group that was trained, or replaced because its rewards are all equal.

        That is up to `loop.max_staleness` + 1 steps after it was chosen.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """All that the next choices depend on, in types that JSON can hold."""
        ...

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Go on from a state."""
        ...


MakeCurriculum: TypeAlias = Callable[[CurriculumPart], Curriculum]


class ChoosingCollector(Collector):
    """A `ChoosingSource`: the groups of the problems that a curriculum chooses.

    Worked example, 2 processes: the second one's curriculum chooses 3, which is the problem 7 of the run.
    """

    def __init__(self, sampler: Sampler, curriculum: Curriculum, part: CurriculumPart) -> None:
        """`part` is what the curriculum was made for."""
        super().__init__(sampler, rank=part.rank)
        self._curriculum = curriculum
        self._part = part
        self._chosen: dict[int, int] = {}
        """Problems of the numbers whose groups have no result yet."""

    async def sample(self, number: int) -> TrajectoryGroup:
        """See `GroupSource`. A problem that is chosen again has other seeds."""
        if number not in self._chosen:
            self._chosen[number] = _check(self._curriculum.choose())
        return await self.sample_problem(self._part.get_problem(self._chosen[number]), attempt=number)

    def tell(self, number: int, group: TrajectoryGroup) -> None:
        """See `ChoosingSource`."""
        self._curriculum.tell(self._chosen.pop(number), group)

    def choices(self) -> Mapping[str, Any]:
        """See `ChoosingSource`."""
        chosen = [list(pair) for pair in sorted(self._chosen.items())]
        return {"chosen": chosen, "curriculum": self._curriculum.state()}

    def restore_choices(self, choices: Mapping[str, Any], /) -> None:
        """See `ChoosingSource`."""
        self._chosen = dict(choices["chosen"])
        self._curriculum.restore(choices["curriculum"])


def make_collector(sampler: Sampler, make: MakeCurriculum | None, *, seed: int, rank: Rank) -> Collector:
    """Make the collector of a process; without a curriculum it takes the problems in their order."""
    if make is None:
        return Collector(sampler, rank=rank)
    part = CurriculumPart.of(sampler.problems.num_problems, seed=seed, rank=rank)
    return ChoosingCollector(sampler, make(part), part)


def _check(problem: Any) -> int:
    if not isinstance(problem, int) or problem < 0:
        raise InvalidInputError(f"Curriculum.choose must return a problem's number, at least 0, got {problem!r}")
    return problem
