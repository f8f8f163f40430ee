"""Sample the groups of each step: a problem's number gives its seed, and each process samples its part.

A curriculum chooses which problem comes next by the results of the groups so far:

    class EasyFirst:                                    # problems 0 .. n-1, the easiest of those seen
        def choose(self) -> int: ...
        def record(self, problem: int, group: TrajectoryGroup) -> None: ...
        def state(self) -> Mapping[str, Any]: ...       # for checkpoints
        def restore(self, state: Mapping[str, Any]) -> None: ...

    def make(part: CurriculumPart) -> EasyFirst: ...    # --curriculum my_curriculum.py:make

The loop counts groups: 0, 1, 2, ... in each process. A group's problem is chosen once, when the group is first sampled;
if it is cancelled, lost or killed, it is sampled again of the same problem.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from unbroken.engines.base import Engine
from unbroken.errors import InvalidInputError
from unbroken.images.processor import ImageInputs
from unbroken.messages import Message, ToolSchema, copy_containers
from unbroken.progress import advance
from unbroken.rendering.base import Renderer
from unbroken.rendering.effects import check_tools_shown
from unbroken.rollout.agents.runner import SessionGateway, run_agent_group
from unbroken.rollout.agents.session import AgentTask
from unbroken.rollout.env import Env
from unbroken.rollout.failures import must_propagate, to_exception
from unbroken.rollout.policies import PoliciesConfig
from unbroken.rollout.runner import run_group
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.config import RolloutConfig
from unbroken.runs.processes import Rank
from unbroken.training.groups import GroupSource
from unbroken.types import SamplingParams

MakeEnv: TypeAlias = Callable[[int], Env]
"""Makes a fresh environment for a problem's number (0, 1, 2, ... without end): the same problem in every call."""
MakeAgentTask: TypeAlias = Callable[[int], AgentTask]
"""Makes the task of a problem's number for an agent; all attempts of a group get the same one."""
Score: TypeAlias = Callable[[int, TrajectoryGroup], Awaitable[TrajectoryGroup]]
"""Takes a problem's number and its group, and returns the group with the final rewards."""
Keep: TypeAlias = Callable[[int, TrajectoryGroup], Awaitable[None]]
"""Takes a problem's number and its group once it is sampled."""
DEFAULT_SET = "evaluation"
"""The name of a run's only set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """The problems to train or to evaluate on, numbered 0, 1, 2, ... without end."""

    env: MakeEnv | None = None
    agent: MakeAgentTask | None = None
    """Instead of `env`: an agent that nobody changed, whose sessions are recorded by a gateway."""
    score: Score | None = None
    """For rewards that need a whole group; without it, the environments' rewards count."""
    row: Callable[[int], Mapping[str, Any]] | None = None
    """A problem's row of the data set, which rollout files keep (`TrajectoryGroup.data`)."""
    source: str = ""
    """Where the problems come from: a run continues only with the same source."""
    num_problems: int | None = None
    """How many different ones there are, for a curriculum; None: without end."""
    has_images: bool = False
    """Whether first messages of environments have images; for images of tools alone there is `RunConfig.images`."""
    first_messages: Callable[[int], tuple[Sequence[Message], Sequence[ToolSchema]]] | None = None
    """The first messages and the tools of a problem, if they are known without its environment."""
    tools: Sequence[ToolSchema] = ()
    """Tools that are known before any episode begins."""
    check_prompts: Callable[[Renderer, int, ImageInputs | None], None] | None = None
    """Raises `InvalidInputError` if prompts leave no room in a context of this length, before a model is loaded."""

    def __post_init__(self) -> None:
        if (self.env is None) == (self.agent is None):
            raise InvalidInputError("problems must have exactly one of env and agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A named set of problems to evaluate on."""

    name: str = DEFAULT_SET
    problems: Problems
    num_problems: int | None = None
    """None: `evaluation.num_problems`."""
    num_samples: int | None = None
    """Rollouts of each problem; None: `evaluation.num_samples`."""
    sampling: SamplingParams | None = None
    """None: `evaluation.sampling`, and without it that of the rollouts."""

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or any(character in self.name for character in "/\n"):
            raise InvalidInputError(f"name must be that of an evaluation set, and of a folder, got {self.name!r}")
        for name in ("num_problems", "num_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInputError(f"{name} must be >= 1, got {value}")


class SamplesElsewhere(Protocol):
    """Another process, which samples in the place of this one."""

    async def sample_group(self, sampler: Sampler, number: int, *, size: int) -> TrajectoryGroup:
        """Sample as `sampler` would here."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Samples groups of one problem each, with a seed derived from `seed` and the problem's number."""

    engine: Engine
    renderer: Renderer
    config: RolloutConfig
    problems: Problems
    seed: tuple[int, ...]
    """Different for each sampler of a run."""
    sampling: SamplingParams | None = None
    """Instead of the config's."""
    sessions: SessionGateway | None = None
    """For problems with agents."""
    returns_experts: bool = False
    """Whether the engine returns the experts of each id, for a trainer that replays them."""
    elsewhere: SamplesElsewhere | None = None
    """What samples instead; then there are no `sessions` here."""
    policies: PoliciesConfig | None = None
    """Several policies, of which environments name who speaks."""
    _shown: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Tools that prompts show, as JSON."""

    async def sample_groups(
        self, numbers: Sequence[int], *, size: int, keep: Keep | None = None
    ) -> list[TrajectoryGroup]:
        """Sample the groups of these problems concurrently; the first error, also of `keep`, cancels all of them.

        Without `keep` they are returned, in their order; with it, each goes to it when it is sampled.
        """

        async def sample(number: int) -> list[TrajectoryGroup]:
            group = await self.sample_group(number, size=size)
            if keep is None:
                return [group]
            await keep(number, group)
            return []

        try:
            async with asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(sample(number)) for number in numbers]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed.exceptions[0].__cause__
        return [each for group in groups for each in group.result()]

    async def sample_group(self, number: int, *, size: int) -> TrajectoryGroup:
        """Sample `size` trajectories of one problem concurrently.

        Raises:
            RolloutError: user code cancels its own task, which whoever waits for the group would not see.
        """
        if self.elsewhere is not None:
            group = await self.elsewhere.sample_group(self, number, size=size)
            advance(size)
            return group
        problems, sampling = self.problems, self._derive_sampling(number)
        group_id = "-".join(map(str, [*self.seed, number]))
        try:
            if problems.agent is not None:
                group = await self._run_agents(problems.agent(number), size, sampling, group_id)
            else:
                assert problems.env is not None, "problems have an env or an agent"
                group = await run_group(
                    partial(problems.env, number),
                    size,
                    engine=self.engine,
                    renderer=self.renderer,
                    sampling=sampling,
                    limits=self.config.limits,
                    group_id=group_id,
                    check_tools=None if self.config.tools_in_messages else self._check_tools,
                    policies=self.policies,
                )
            if problems.score is not None:
                group = await problems.score(number, group)
            if problems.row is not None:
                # An environment may keep the row and change it in its next episode, while this group is written.
                group = replace(group, data=copy_containers(await asyncio.to_thread(problems.row, number)))
        except asyncio.CancelledError as error:
            if must_propagate(error):
                raise
            raise to_exception(error) from error
        advance(size)
        return group

    def _derive_sampling(self, number: int) -> SamplingParams:
        """The parameters of a problem's group, with its own seed."""
        sampling = self.sampling or self.config.sampling
        entropy = [*self.seed, number] if sampling.seed is None else [*self.seed, number, sampling.seed]
        return replace(
            sampling,
            seed=int(np.random.SeedSequence(entropy).generate_state(1)[0]),
            return_routed_experts=sampling.return_routed_experts or self.returns_experts,
            # Always, for a trainer: an agent may ask for a format, which cuts too.
            return_kept_ids=self.sampling is None,
        )

    async def _run_agents(
        self, problem: AgentTask, size: int, sampling: SamplingParams, group_id: str
    ) -> TrajectoryGroup:
        """Have `size` agents attempt a problem at the run's gateway."""
        assert self.sessions is not None, "a run opens the gateway"
        group = await run_agent_group(
            problem.agent,
            size,
            gateway=self.sessions,
            task=problem.task,
            sampling=sampling,
            limits=self.config.limits,
            is_scored_later=self.problems.score is not None or problem.score is not None,
            group_id=group_id,
        )
        return group if problem.score is None else await problem.score(group)

    def _check_tools(self, tools: Sequence[ToolSchema]) -> None:
        """Raise `ToolsNotShownError` for tools that prompts do not show; the same tools are checked once."""
        key = json.dumps(tools, sort_keys=True, default=str)
        if key not in self._shown:
            check_tools_shown(self.renderer, tools)
            self._shown.add(key)


class Collector(GroupSource):
    """The groups of this process's part of the problems, in their order.

    Worked example, 4 problems a step and 2 processes: in step 0 the first process has problems 0 and 2, the second 1
    and 3; in step 1 they have 4 and 6, 5 and 7.
    """

    def __init__(self, sampler: Sampler, *, rank: Rank | None = None) -> None:
        """Raises `InvalidInputError` if a step has fewer problems than processes."""
        self._sampler = sampler
        self._rank = rank or Rank()
        num_problems = sampler.config.problems_per_step
        if num_problems < self._rank.num_processes:
            raise InvalidInputError(
                f"rollouts.problems_per_step must be at least the number of processes, {self._rank.num_processes}, "
                f"got {num_problems}"
            )
        self.groups_per_step = len(self._rank.select(range(num_problems)))

    async def sample(self, number: int) -> TrajectoryGroup:
        """Sample a group of the problem that this number stands for."""
        num_problems = self._sampler.config.problems_per_step
        step, place = divmod(number, self.groups_per_step)
        problem = self._rank.select(range(step * num_problems, (step + 1) * num_problems))[place]
        return await self._sampler.sample_group(problem, size=self._sampler.config.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumPart:
    """The part of the problems that one process trains on: its own numbers 0, 1, 2, ..."""

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

    def record(self, problem: int, group: TrajectoryGroup, /) -> None:
        """Take note of a group that was trained, or replaced because its rewards are all equal.

        That is up to `loop.max_staleness` + 1 steps after it was chosen.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """All that the next choices depend on, in types that JSON can hold."""
        ...

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Continue from a state."""
        ...


MakeCurriculum: TypeAlias = Callable[[CurriculumPart], Curriculum]


class _ChoosingCollector(Collector):
    """The groups of the problems that a curriculum chooses.

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
        sampler = replace(self._sampler, seed=(*self._sampler.seed, number))
        return await sampler.sample_group(self._part.get_problem(self._chosen[number]), size=sampler.config.group_size)

    def record(self, number: int, group: TrajectoryGroup) -> None:
        """See `GroupSource`."""
        self._curriculum.record(self._chosen.pop(number), group)

    def choices(self) -> Mapping[str, Any]:
        """See `GroupSource`."""
        chosen = [list(pair) for pair in sorted(self._chosen.items())]
        return {"chosen": chosen, "curriculum": self._curriculum.state()}

    def restore_choices(self, choices: Mapping[str, Any], /) -> None:
        """See `GroupSource`."""
        self._chosen = dict(choices["chosen"])
        self._curriculum.restore(choices["curriculum"])


def make_collector(sampler: Sampler, make: MakeCurriculum | None, *, seed: int, rank: Rank) -> Collector:
    """Make the collector of a process; without a curriculum it takes the problems in their order."""
    if make is None:
        return Collector(sampler, rank=rank)
    part = CurriculumPart.of(sampler.problems.num_problems, seed=seed, rank=rank)
    return _ChoosingCollector(sampler, make(part), part)


def _check(problem: Any) -> int:
    if not isinstance(problem, int) or problem < 0:
        raise InvalidInputError(f"Curriculum.choose must return a problem's number, at least 0, got {problem!r}")
    return problem
