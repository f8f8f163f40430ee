"""Schedules of sampling and training on a virtual clock: the loop is the real one, its trainer and engine only wait.

bench/simulate.py compares them with timed runs, and tests check the loop's staleness and arithmetic. An event loop
jumps to the next timer instead of waiting for it:

    real loop      sleep(5) and sleep(3)     5 seconds of everybody's time
    virtual loop   sleep(5) and sleep(3)     time() is 3, then 5, at once

That is for code that waits only for timers and for other tasks. Threads, processes and sockets have times of their own.

All requests that the engine samples get their next id together. Its *progress* is the number of ids that a request from
the beginning would have by now. A request of n ids that began at progress p ends at p + n. Progress rises by one in
`id_s + id_s_per_request * requests` seconds, and stands still while prompts are computed or weights are taken.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
from collections import Counter, defaultdict, deque
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from unbroken.counters import Counters, add_effort
from unbroken.errors import EngineError, InvalidInputError
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup, TrajectoryStatus
from unbroken.training.config import LoopConfig
from unbroken.training.groups import TakenGroups
from unbroken.training.loop import run_steps
from unbroken.training.observer import IdleTimes
from unbroken.types import FinishReason, SampledSequence, VersionSpan

_T = TypeVar("_T")
_ROUNDING = 1e-6
"""Of an id: progress is a sum of many floats."""
_LEAST_GAIN = 0.01
"""A further time must explain this share of what is left."""


class _JumpingSelector(selectors.DefaultSelector):
    """Advances the clock instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors.BaseSelector`."""
        if timeout is None:
            raise RuntimeError("the simulation stands still: every task waits for another one, and no timer is left")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """The loop; `time()` begins at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now_s


def run_on_virtual_clock(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on a clock of its own, outside of any event loop; raises `RuntimeError` if it stands still."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """The rollouts of a step."""

    groups_per_step: int = 16
    group_size: int = 8
    prompt_ids: int = 200
    num_turns: int = 1
    median: int = 200
    """Sampled ids of a turn, which are lognormal and cut to `max_ids`."""
    sigma: float = 1.0
    """The standard deviation of their logarithm. With 1, the 95th percentile is five medians."""
    max_ids: int = 4096
    tool_s: float = 0.0
    """Seconds of a tool between two turns."""
    reply_ids: int = 0
    """Ids that a tool's reply adds to the prompt of the next turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """How long an engine takes."""

    first_s: float = 0.0
    """Seconds that a turn waits before its first id, whatever else the engine does."""
    id_s: float = 0.01
    """Seconds for the next id of all requests."""
    id_s_per_request: float = 0.0
    """Added to `id_s` for each request that is sampled."""
    prompt_id_s: float = 0.0
    """Seconds for an id of a prompt that is not cached. Meanwhile no request gets a sampled id."""
    max_requests: int | None = None
    """Requests that are sampled at the same time; others wait. None: no maximum."""
    update_s: float = 0.0
    """How long the engine stands still for new weights, as a part of `trainer.publish_s`."""
    recomputes_kv: bool = True
    """Whether requests in flight compute their ids again after an update, at `prompt_id_s` each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTimes:
    """How long a trainer takes."""

    step_s: float = 1.0
    """Seconds of a step without any ids."""
    id_s: float = 0.0
    """Seconds for each id of the step's rollouts, those of prompts included."""
    snapshot_s: float = 0.0
    """Seconds to copy the weights that are published beside the next step; with staleness 0 there is no copy."""
    publish_s: float = 0.1
    """Seconds until the engine has new weights."""
    save_s: float = 0.0
    """Seconds of a checkpoint."""
    save_every: int = 1
    """Steps between two checkpoints."""
    end_s: float = 0.0
    """Seconds after each step, such as for metrics."""
    evaluation_s: float = 0.0
    """Seconds of an evaluation, for which the trainer waits with staleness 0; otherwise it runs beside the steps."""
    evaluation_every: int = 0
    """Steps between two evaluations; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """What is simulated."""

    num_steps: int = 50
    num_warmup: int = 5
    """Of these steps, those at the beginning that do not count."""
    adapt_ahead: bool = True
    """As loop.adapt_ahead of a run."""
    max_drops: int = 0
    """As loop.max_drops of a run."""
    max_groups_in_flight: int | None = None
    """As loop.max_groups_in_flight of a run."""
    publish_beside_step: bool = True
    """As loop.publish_beside_step of a run."""
    seed: int = 0
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    engine: EngineTimes = field(default_factory=EngineTimes)
    trainer: TrainerTimes = field(default_factory=TrainerTimes)

    def __post_init__(self) -> None:
        if not 1 <= self.num_warmup < self.num_steps:  # in the first step nothing is trained yet
            raise InvalidInputError(
                f"num_warmup must be >= 1 and < num_steps ({self.num_steps}), got {self.num_warmup}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTurn:
    """A turn of a rollout."""

    num_ids: int
    """Sampled ids, at least 1."""
    tool_s: float = 0.0
    """Seconds until the next turn."""


class Plan(Protocol):
    """The turns of all rollouts."""

    def turns(self, number: int, member: int) -> Sequence[PlannedTurn]:
        """The turns of a member of a group, the same in each call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPlan:
    """Draws the turns of a config."""

    config: WorkloadConfig
    seed: int

    def turns(self, number: int, member: int) -> Sequence[PlannedTurn]:
        """See `Plan`."""
        rng = np.random.default_rng([self.seed, number, member])
        drawn = rng.lognormal(np.log(self.config.median), self.config.sigma, self.config.num_turns)
        lengths = np.clip(np.rint(drawn), 1, self.config.max_ids).astype(int).tolist()
        pauses = [self.config.tool_s] * (len(lengths) - 1) + [0.0]
        return [PlannedTurn(num_ids=num_ids, tool_s=tool_s) for num_ids, tool_s in zip(lengths, pauses, strict=True)]


@dataclass(slots=True, eq=False)
class _Request:
    began: float
    """The engine's progress when its first id began."""
    num_ids: int
    num_prompt_ids: int
    is_done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def end(self) -> float:
        return self.began + self.num_ids


class SimulatedEngine:
    """One engine. It is used in one event loop, whose clock it takes."""

    def __init__(self, times: EngineTimes, *, policy_version: int = 0) -> None:
        """It begins with this version of the weights."""
        self.policy_version = policy_version
        self._times = times
        self._running: set[_Request] = set()
        self._ends: list[tuple[float, int, _Request]] = []
        """A heap by the progress at which requests end."""
        self._order = itertools.count()
        self._updates: list[tuple[float, int]] = [(0.0, policy_version)]
        """The progress at which each version came."""
        self._progress = 0.0
        self._stall_s = 0.0
        """Seconds for which progress stands still from now on."""
        self._settled_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._num_admitted = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def update_s(self) -> float:
        """How long it stands still for new weights."""
        return self._times.update_s

    async def sample(self, num_ids: int, *, num_prompt_ids: int, num_new_ids: int) -> tuple[VersionSpan, ...]:
        """Sample `num_ids` after a prompt of which `num_new_ids` are not cached; returns the versions of the ids."""
        await self._enter()
        try:
            await asyncio.sleep(self._times.first_s)
            self._settle()
            self._stall_s += num_new_ids * self._times.prompt_id_s
            request = _Request(self._progress, num_ids, num_prompt_ids)
            self._running.add(request)
            heapq.heappush(self._ends, (request.end, next(self._order), request))
            self._set_timer()
            try:
                await request.is_done.wait()
            finally:
                if request in self._running:  # it was cancelled
                    self._settle()
                    self._running.discard(request)
                    self._set_timer()
            return self._find_spans(request)
        finally:
            self._leave()

    async def update(self, policy_version: int) -> None:
        """Take new weights."""
        self._settle()
        self._stall_s += self._times.update_s
        self._set_timer()
        await asyncio.sleep(self._times.update_s)
        self._settle()
        self.policy_version = policy_version
        self._updates.append((self._progress, policy_version))
        if self._times.recomputes_kv:
            num_ids = sum(each.num_prompt_ids + int(self._progress - each.began) for each in self._running)
            self._stall_s += num_ids * self._times.prompt_id_s
        self._set_timer()

    async def _enter(self) -> None:
        """Wait for a place."""
        limit = self._times.max_requests
        if limit is not None and self._num_admitted >= limit:
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():
                    self._leave()
                raise
        else:
            self._num_admitted += 1

    def _leave(self) -> None:
        """Give the place to the next one that waits."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._num_admitted -= 1

    def _settle(self) -> None:
        """Bring progress up to the present."""
        now_s = asyncio.get_running_loop().time()
        seconds, self._settled_s = now_s - self._settled_s, now_s
        stalled_s = min(seconds, self._stall_s)
        self._stall_s -= stalled_s
        if self._running:
            self._progress += (seconds - stalled_s) / self._id_s

    def _set_timer(self) -> None:
        """End the requests whose time has come, and be there for the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and (self._ends[0][2] not in self._running or self._ends[0][0] <= self._progress + _ROUNDING):
            _, _, request = heapq.heappop(self._ends)
            self._running.discard(request)
            request.is_done.set()
        if self._ends:
            wait_s = self._stall_s + (self._ends[0][0] - self._progress) * self._id_s
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._advance)

    def _advance(self) -> None:
        self._settle()
        self._set_timer()

    @property
    def _id_s(self) -> float:
        return self._times.id_s + self._times.id_s_per_request * len(self._running)

    def _find_spans(self, request: _Request) -> tuple[VersionSpan, ...]:
        """The versions of its ids; one that was being computed during an update is of the newer weights."""
        starts: dict[int, int] = {}
        for progress, version in self._updates:
            start = max(0, int(progress - request.began + _ROUNDING))
            if start < request.num_ids:
                starts[start] = version
        bounds = [*starts, request.num_ids]
        pairs = zip(starts.values(), itertools.pairwise(bounds), strict=True)
        return tuple(VersionSpan(start=start, stop=stop, policy_version=version) for version, (start, stop) in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSource:
    """A `GroupSource`."""

    engine: SimulatedEngine
    plan: Plan
    config: WorkloadConfig

    @property
    def groups_per_step(self) -> int:
        """See `GroupSource`."""
        return self.config.groups_per_step

    async def sample(self, number: int) -> TrajectoryGroup:
        """See `GroupSource`."""
        async with asyncio.TaskGroup() as tasks:
            members = [tasks.create_task(self._roll_out(number, k)) for k in range(self.config.group_size)]
        return TrajectoryGroup(group_id=str(number), trajectories=tuple(member.result() for member in members))

    async def _roll_out(self, number: int, member: int) -> Trajectory:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        tree = TokenTree()
        end = tree.add_given(np.zeros(self.config.prompt_ids, np.int32), Origin.PROMPT, parent=None)
        num_ids, num_new_ids = self.config.prompt_ids, self.config.prompt_ids
        turns = self.plan.turns(number, member)
        for index, turn in enumerate(turns):
            spans = await self.engine.sample(turn.num_ids, num_prompt_ids=num_ids, num_new_ids=num_new_ids)
            end = tree.add_sampled(_make_sequence(spans), parent=end)
            add_effort(turn.num_ids)
            num_ids, num_new_ids = num_ids + turn.num_ids, self.config.reply_ids
            await asyncio.sleep(turn.tool_s)
            if num_new_ids and index + 1 < len(turns):
                end = tree.add_given(np.zeros(num_new_ids, np.int32), Origin.BRIDGE, parent=end)
                num_ids += num_new_ids
        return Trajectory(
            trajectory_id=f"{number}.{member}", tree=tree, turns=(), messages=(), tools=(), reward=0.0, error=None,
            status=TrajectoryStatus.COMPLETED, counters=Counters(), wall_time_s=loop.time() - started_s,
        )  # fmt: skip


def _make_sequence(spans: Sequence[VersionSpan]) -> SampledSequence:
    num_ids = spans[-1].stop
    return SampledSequence(
        completion_ids=np.zeros(num_ids, np.int32),
        rollout_logprobs=np.zeros(num_ids, np.float32),
        finish_reason=FinishReason.STOP,
        version_spans=tuple(spans),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A step that was made."""

    begun_s: float
    """When its groups were taken."""
    ended_s: float
    num_groups: int
    ids_by_staleness: Mapping[int, int]
    """Sampled ids for each number of policy versions between the one that sampled them and the trainer's."""
    num_given_up: int
    """Groups that were cancelled or dropped since the step before."""
    num_ids_given_up: int
    idle: Mapping[str, float | None]
    """As in a run's metrics."""

    @property
    def num_ids(self) -> int:
        """Sampled ids that were trained."""
        return sum(self.ids_by_staleness.values())


@dataclass(slots=True, kw_only=True)
class SimulatedTrainer:
    """A `StepMaker` of one process."""

    times: TrainerTimes
    engine: SimulatedEngine
    idle: IdleTimes
    """Sees the loop's events."""
    is_serial: bool
    """Whether evaluations are made between two steps."""
    policy_version: int = 0
    steps: list[SimulatedStep] = field(default_factory=list)
    _taken: TakenGroups | None = None
    _begun_s: float = 0.0
    _ids_by_staleness: Mapping[int, int] = field(default_factory=dict)
    _idle: Mapping[str, float | None] = field(default_factory=dict)

    async def agree(self, *, is_lost: bool, failure: Exception | None) -> bool:
        """See `StepMaker`."""
        if failure is not None:
            raise failure
        return is_lost

    async def recover(self, lost: EngineError | None) -> None:
        """See `StepMaker`: a simulated engine is never lost."""

    async def find_loss(self, groups: Sequence[TrajectoryGroup], *, oldest_version: int) -> EngineError | None:
        """See `StepMaker`."""
        return None

    async def is_outage(self, error: EngineError) -> bool:
        """See `StepMaker`."""
        return False

    async def make_step(self, taken: TakenGroups) -> None:
        """See `StepMaker`."""
        self._taken, self._begun_s = taken, _now_s()
        self._idle = self.idle.take_metrics(self._begun_s)
        self._ids_by_staleness = count_staleness(taken.groups, self.policy_version)
        await asyncio.sleep(self.times.step_s + self.times.id_s * _count_ids(taken.groups))
        self.policy_version += 1
        if (taken.step + 1) % self.times.save_every == 0:
            await asyncio.sleep(self.times.save_s)

    def around_step(self, step: int) -> AbstractContextManager[None]:
        """See `StepMaker`."""
        return nullcontext()

    async def publish_now(self) -> None:
        """See `StepMaker`."""
        await self.publish(None, policy_version=self.policy_version)

    async def snapshot(self) -> Any:
        """See `StepMaker`."""
        await asyncio.sleep(self.times.snapshot_s)

    async def publish(self, snapshot: Any, *, policy_version: int) -> bool:
        """See `StepMaker`: the engine goes on until the weights have arrived."""
        await asyncio.sleep(max(0.0, self.times.publish_s - self.engine.update_s))
        await self.engine.update(policy_version)
        return True

    def needs_engine(self, step: int) -> bool:
        """See `StepMaker`."""
        return self.times.evaluation_every > 0 and (step + 1) % self.times.evaluation_every == 0

    async def end_step(self, step: int) -> None:
        """See `StepMaker`."""
        assert self._taken is not None, "make_step is called first"
        counts = self._taken.counts
        if self.is_serial and self.needs_engine(step):  # otherwise it runs beside the steps
            await asyncio.sleep(self.times.evaluation_s)
        await asyncio.sleep(self.times.end_s)
        self.steps.append(
            SimulatedStep(
                begun_s=self._begun_s,
                ended_s=_now_s(),
                num_groups=len(self._taken.groups),
                ids_by_staleness=self._ids_by_staleness,
                num_given_up=counts.num_cancelled + counts.num_dropped,
                num_ids_given_up=counts.num_cancelled_ids + counts.num_dropped_ids,
                idle=self._idle,
            )
        )


def count_staleness(groups: Sequence[TrajectoryGroup], policy_version: int) -> Mapping[int, int]:
    """Sampled ids for each number of versions between theirs and `policy_version`."""
    counts: Counter[int] = Counter()
    for node in _nodes(groups):
        if node.origin is Origin.SAMPLED:
            versions, num_ids = np.unique(node.policy_versions, return_counts=True)
            counts.update(dict(zip((policy_version - versions).tolist(), num_ids.tolist(), strict=True)))
    return counts


def _count_ids(groups: Sequence[TrajectoryGroup]) -> int:
    return sum(len(node.token_ids) for node in _nodes(groups))


def _nodes(groups: Sequence[TrajectoryGroup]) -> list[Any]:
    return [node for group in groups for member in group.trajectories for node in member.tree.nodes]


def _now_s() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a schedule, without its first steps, and those at the end for which nothing more was sampled."""

    max_staleness: int
    total_s: float
    steps: Sequence[SimulatedStep]
    """Those that count."""

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return self.total_s / len(self.steps)

    @property
    def groups_per_s(self) -> float:
        """Groups trained in a second."""
        return sum(step.num_groups for step in self.steps) / self.total_s

    @property
    def ids_by_staleness(self) -> Counter[int]:
        """Sampled ids that were trained, by staleness."""
        total: Counter[int] = Counter()
        for step in self.steps:
            total.update(step.ids_by_staleness)
        return total

    @property
    def mean_staleness(self) -> float:
        """Of the ids that were trained."""
        counts = self.ids_by_staleness
        return sum(lag * count for lag, count in counts.items()) / counts.total()

    @property
    def given_up_share(self) -> float:
        """Share of all groups that were cancelled or dropped."""
        given_up = sum(step.num_given_up for step in self.steps)
        return given_up / (given_up + sum(step.num_groups for step in self.steps))

    def mean_idle(self, name: str) -> float:
        """The mean of an idle share over the steps, each weighed by its time."""
        starts = [step.begun_s for step in self.steps]
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        shares = [step.idle[name] or 0.0 for step in self.steps[1:]]
        total_s = sum(lengths)
        if not total_s:
            return self.steps[0].idle[name] or 0.0
        return sum(share * length for share, length in zip(shares, lengths, strict=True)) / total_s


def simulate(config: SimulationConfig, max_staleness: int, *, plan: Plan | None = None) -> Outcome:
    """Simulate one schedule, with the rollouts of `plan` instead of the config's lengths and turns.

    Worked example: groups that take 3 s however many there are, steps of 2 s, 0.5 s to publish. With staleness 0 a step
    takes 5.5 s. With 2, groups for two steps and more are in flight at once, and a step takes 2 s. With 2 and no more
    groups in flight than a step has, it takes 3 s.
    """
    loop_config = LoopConfig(
        num_steps=config.num_steps + count_ending_steps(max_staleness),
        max_staleness=max_staleness,
        adapt_ahead=config.adapt_ahead,
        max_drops=config.max_drops,
        max_groups_in_flight=config.max_groups_in_flight,
        publish_beside_step=config.publish_beside_step and max_staleness > 0,
    )
    plan = plan or RandomPlan(config=config.workload, seed=config.seed)
    steps = run_on_virtual_clock(_run(config, loop_config, plan))
    first, *counted = steps[config.num_warmup - 1 : config.num_steps]
    return Outcome(max_staleness=max_staleness, total_s=counted[-1].ended_s - first.ended_s, steps=counted)


def count_ending_steps(max_staleness: int) -> int:
    """How many steps at the end of a run may find all groups sampled: with nothing beside them, they take less time."""
    return max_staleness + 1 if max_staleness else 0


async def _run(config: SimulationConfig, loop_config: LoopConfig, plan: Plan) -> Sequence[SimulatedStep]:
    engine, idle = SimulatedEngine(config.engine), IdleTimes()
    trainer = SimulatedTrainer(
        times=config.trainer,
        engine=engine,
        idle=idle,
        is_serial=loop_config.max_staleness == 0,
    )
    source = SimulatedSource(engine=engine, plan=plan, config=config.workload)
    await run_steps(source, trainer, loop_config, observe=idle.observe)
    return trainer.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRollout:
    """A rollout that a run has recorded."""

    step: int
    lengths: Sequence[int]
    """Sampled ids of each turn; one turn or more."""
    seconds: float


def fit_times(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The factors of `columns`, K of N numbers each, whose sum is closest to `seconds`, none of them negative.

    A column that explains nothing more than those before it gets the factor 0.
    """
    table, target = np.asarray(columns, dtype=np.float64).T, np.asarray(seconds, dtype=np.float64)
    best, least = [0.0] * len(columns), float((target**2).sum())
    for size in range(1, len(columns) + 1):
        for chosen in itertools.combinations(range(len(columns)), size):
            factors = _solve(table[:, chosen], target)
            left = float(((table[:, chosen] @ factors - target) ** 2).sum())
            if (factors >= 0).all() and left < least * (1 - _LEAST_GAIN):
                least = left
                best = [0.0] * len(columns)
                for index, factor in zip(chosen, factors.tolist(), strict=True):
                    best[index] = factor
    return best


def fit_engine(rollouts: Sequence[MeasuredRollout], *, num_together: float | None) -> EngineTimes:
    """Times of an engine: of a turn, of an id, and, with `num_together`, of an id for each other request.

    `num_together` rollouts of one turn each begin at the same time in every step. Then a rollout of n ids waits for the
    sum of min(n, m) ids over all of them, m being theirs: short ones have left the engine by then.
    """
    columns: list[Sequence[float]] = [
        [len(each.lengths) for each in rollouts],
        [sum(each.lengths) for each in rollouts],
    ]
    if num_together is not None and all(len(each.lengths) == 1 for each in rollouts):
        columns.append(_count_shared_ids(rollouts, num_together))
    first_s, id_s, *more = fit_times(columns, [each.seconds for each in rollouts])
    if id_s + sum(more) == 0:  # rollouts are all as long
        return EngineTimes(id_s=sum(each.seconds for each in rollouts) / sum(columns[1]))
    return EngineTimes(first_s=first_s, id_s=id_s, id_s_per_request=sum(more))


def _count_shared_ids(rollouts: Sequence[MeasuredRollout], num_together: float) -> list[float]:
    """For each rollout, the ids of all rollouts of its step up to its own length; few of them may be recorded."""
    by_step: dict[int, list[int]] = defaultdict(list)
    for each in rollouts:
        by_step[each.step] += each.lengths
    return [
        float(np.minimum(by_step[each.step], each.lengths[0]).sum()) * num_together / len(by_step[each.step])
        for each in rollouts
    ]


def _solve(table: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.lstsq(table, target, rcond=None)[0], dtype=np.float64)
