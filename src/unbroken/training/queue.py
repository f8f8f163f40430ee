"""The queue of one process's groups: in flight, and finished until a step takes them.

    number ── may start? ──► in flight ──► finished ──► taken by a step
      ▲                         │ lost          │ dropped: too old for the next step; or replaced by another number
      └─────────────────────────┴───────────────┘

All of it happens in the event loop's thread: whatever changes calls `fill`, which starts what may start.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unbroken.counters import Effort, count_effort
from unbroken.errors import EngineError
from unbroken.rollout.failures import to_exception
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.timeline import Timeline, Track
from unbroken.training.config import LoopConfig
from unbroken.training.groups import GroupNumbers, GroupSource
from unbroken.training.metrics.step_log import IdleTimes
from unbroken.training.outages import Outages
from unbroken.training.sums import Sums
from unbroken.training.trainer import Trainer
from unbroken.training.waits import in_any_process, raise_together

SAMPLED = "group in flight"
QUEUED = "group in the queue"
"""Lanes of the timeline."""
_WAITED = 0.01
"""The share of a step's time from which on the trainer has waited."""
_FALL = 1 / 8
_REMEMBERED = 32
"""Steps for which a limit is remembered as too low."""
_READY = 1 / 4
"""The share of a step's groups that must be ready besides its own before the limit falls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts(Sums):
    """What became of the groups of a process that were not trained, since the step before."""

    num_dropped: int = 0
    """Finished, too old for the next step: a server that had missed an update sampled them."""
    num_lost: int = 0
    """Their engine went away."""
    num_dropped_ids: int = 0
    num_lost_ids: int = 0
    """Sampled ids, of turns that had ended."""
    num_queued: int = 0
    """Finished groups that were left when the step's groups were taken."""
    num_in_flight: int = 0
    """Groups that were being sampled then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """The groups of this process for one step."""

    step: int
    """From 0."""
    groups: Sequence[TrajectoryGroup]
    counts: GroupCounts
    since_last_s: float
    """Since the groups of the step before were taken, or the loop began."""
    idle: Mapping[str, float | None]
    """Shares of the time since then, and means over it (`IdleTimes`)."""
    state: Mapping[str, Any]
    """For the checkpoint: which groups are trained after this step (`GroupNumbers.state`), and the source's choices."""
    replaced: Sequence[TrajectoryGroup] = ()
    """Groups whose rewards are all equal, instead of which others were sampled since the step before."""

    @property
    def sampled(self) -> Sequence[TrajectoryGroup]:
        """All groups, the replaced ones last."""
        return [*self.groups, *self.replaced]


@dataclass(slots=True, kw_only=True, eq=False)
class _LiveGroup:
    """A group in flight, or finished and not yet taken."""

    number: int
    oldest_version: int
    """Version of its oldest id; while it is in flight, that of the engine when it started."""
    has_seen_outages: int
    """Outages before it was started."""
    effort: Effort = field(default_factory=Effort)
    group: TrajectoryGroup | None = None

    @property
    def is_finished(self) -> bool:
        """Whether it can be taken."""
        return self.group is not None


@dataclass(slots=True, kw_only=True, eq=False)
class GroupQueue:
    """Samples the groups of each step, and ahead of the trainer as far as the staleness bound S allows.

    With S = 0 nothing is sampled from when a step's groups are taken until the next ones are waited for: the step is
    trained, and the engine may be used by others, or sleep.

    The bound. A group whose oldest id was sampled by version a may be trained at the versions a, a + 1, ..., a + S,
    and is too old from then on. With P groups a step, and i groups before it that are not yet taken, a new group is
    trained i // P steps after the next one. It starts only if that is in time, so S also bounds the groups that wait.
    Worked example, S = 1 and P = 2, the engine has version 4:

        the next step has version 4    groups 0 1 are trained at 4, groups 2 3 at 5, group 4 would be at 6: it waits
        the next step has version 5    groups 0 1 are trained at 5: group 2 waits until the engine has version 5

    How far ahead. No further than keeps the trainer busy, as each group that waits grows older: the limit of groups
    in flight and finished rises by a step's groups after each step that the trainer waited for, and falls by an eighth
    of them after each step that found others ready besides its own. It does not fall to one that the trainer waited
    with, until 32 steps have passed since.

    Groups that teach nothing are replaced by those of further numbers. Worked example, 3 groups a step, at most 3
    replaced, S = 0; the same numbers are sampled in whatever order they finish:

        sampled     4: 0 1 1    5: 1 1 1    6: 0 0 1            5 has one reward only
                                7: 0 0 0                        so has 7
                                8: 1 0 1                        trained: 4 6 8; replaced: 5 7; the next step has 9 10 11
    """

    source: GroupSource
    config: LoopConfig
    outages: Outages
    has_variance: Callable[[TrajectoryGroup], bool]
    """Groups without it are replaced, as far as the config allows."""
    timeline: Timeline
    engine_version: int
    """The weights that all engines of this process have at least; the trainer begins with the same."""
    numbers: GroupNumbers
    idle: IdleTimes = field(init=False, default_factory=IdleTimes)
    lost: EngineError | None = field(init=False, default=None)
    """Why a group was lost, since the last outage that the trainer has dealt with. No group starts until then."""
    failure: Exception | None = field(init=False, default=None)
    """An error that ends the run."""
    _replaced: dict[int, TrajectoryGroup] = field(init=False, default_factory=dict)
    """By their numbers, since the step before."""
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    """Set when a group has finished, or `lost` or `failure` is set."""
    _is_paused: bool = field(init=False, default=True)
    """Nothing is sampled before `wait` is called."""
    _is_held: bool = field(init=False, default=False)
    _next_version: int = field(init=False)
    """The version that the next step begins with, at the latest."""
    _live: list[_LiveGroup] = field(init=False, default_factory=list)
    """In the order in which they were started."""
    _num_finished: int = field(init=False, default=0)
    """How many of these are. Counted, because a step may have thousands of groups, each of which is looked at."""
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _num_outages: int = field(init=False, default=0)
    _counts: GroupCounts = field(init=False, default_factory=GroupCounts)
    _limit: int = field(init=False)
    """Groups in flight and finished."""
    _too_low: int = field(init=False, default=0)
    """The last limit that the trainer waited with."""
    _num_steps: int = field(init=False, default=0)
    """Since then."""

    def __post_init__(self) -> None:
        self._next_version = self.engine_version
        self._limit = min(2 * self.source.groups_per_step, self._highest_limit)

    @property
    def num_in_flight(self) -> int:
        """Groups that are being sampled."""
        return len(self._live) - self._num_finished

    @property
    def num_queued(self) -> int:
        """Groups that are finished and not yet taken."""
        return self._num_finished

    @property
    def _is_stopped(self) -> bool:
        """Whether no group starts, until the trainer has seen to a lost engine, or because the run ends."""
        return self.lost is not None or self.failure is not None

    async def wait(self, step: int, version: int) -> list[_LiveGroup] | None:
        """Wait for the groups of a step that begins with `version`; None once an engine is lost or the run fails."""
        self._is_paused = False
        self.fill()
        if (chosen := self._choose(version)) is not None or self._is_stopped:
            return chosen
        self.idle.set(waits=1)
        with self.timeline.span("wait for groups", step=step):
            while (chosen := self._choose(version)) is None and not self._is_stopped:
                self._changed.clear()
                await self._changed.wait()
        self.idle.set(waits=0)
        return chosen

    def take(self, chosen: Sequence[_LiveGroup], step: int, *, next_version: int) -> StepGroups:
        """Take finished groups for a step, in the order of their numbers: they are trained from now on.

        The step after it begins with `next_version` at the latest. `failure` is set if the source cannot record them.
        """
        self._is_paused = not self._is_ahead
        chosen = sorted(chosen, key=lambda live: live.number)
        taken = set(chosen)
        self._live = [live for live in self._live if live not in taken]
        self._num_finished -= len(chosen)
        self.numbers.mark_trained(live.number for live in chosen)
        for live in chosen:
            self._record(live)
            self._end_lane(live, QUEUED, "trained", step=step)
        since_last_s, idle = self.idle.take()
        self._adapt_limit(waited=idle["idle/trainer"] or 0.0)
        replaced, self._replaced = self._replaced, {}
        counts, self._counts = self._counts, GroupCounts()
        of_step = StepGroups(
            step=step,
            groups=[live.group for live in chosen if live.group is not None],
            replaced=[replaced[number] for number in sorted(replaced)],
            counts=counts + GroupCounts(num_queued=self.num_queued, num_in_flight=self.num_in_flight),
            since_last_s=since_last_s,
            idle=idle,
            state=self.get_state(),
        )
        self.set_next_version(next_version)
        return of_step

    def fill(self) -> None:
        """Start the groups that may start."""
        if self._is_paused:
            return
        while not self._is_stopped and self.numbers.has_next:
            may_start = len(self._live) < self._limit and self._is_in_time()
            if self._is_ahead:
                self._hold(not may_start)
            if not may_start:
                return
            number = self.numbers.take_next()
            live = _LiveGroup(
                number=number,
                oldest_version=self.engine_version,
                has_seen_outages=self._num_outages,
            )
            self._live.append(live)
            task = asyncio.create_task(self._sample(live))
            self._tasks.add(task)
            task.add_done_callback(self._end_task)
            self.timeline.begin_lane(SAMPLED, number, version=live.oldest_version)
            self._show_counts()

    def set_engine_version(self, version: int) -> None:
        """All engines of this process have these weights now."""
        self.engine_version = max(self.engine_version, version)
        self.fill()

    def set_next_version(self, version: int) -> None:
        """The next step begins with these weights: what is too old for it is sampled again."""
        self._next_version = version
        for live in [live for live in self._live if live.is_finished and self._is_too_old(live, version)]:
            self._drop(live)
        self.fill()

    def lose(self, error: EngineError) -> None:
        """Start no more groups until the trainer has seen to the engine."""
        self.lost = self.lost or error
        self._changed.set()

    def end_outage(self, version: int) -> None:
        """The engine is back, with these weights."""
        self.lost = None
        self._num_outages += 1
        self.set_engine_version(version)

    def fail(self, error: Exception) -> None:
        """End the run with this error, in all processes, when they meet next."""
        self.failure = self.failure or error
        self._changed.set()

    async def meet(self, trainer: Trainer) -> bool:
        """Meet the other processes: a failure of one is raised in all. Returns whether any has lost its engine."""
        is_lost = self.lost is not None
        await raise_together(trainer, self.failure)
        return await in_any_process(trainer, is_lost)

    async def close(self) -> None:
        """Cancel what is in flight, and wait until it has ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _sample(self, live: _LiveGroup) -> None:
        """Sample a group; it is then finished, replaced or dropped, or lost with its engine."""
        try:
            with count_effort(live.effort):
                group = await self.source.sample(live.number)
            lost = await self.outages.find_loss(group, oldest_version=self._find_oldest_usable(live))
        except EngineError as error:
            # An engine that is there has refused the request, and would refuse it again.
            if not await self.outages.is_outage(error):
                raise
            self._lose_group(live, error)
            return
        if lost is None:
            # While others are sampled, for the step that takes the group; those of an agent with many forks take long.
            await asyncio.to_thread(_build_rows, group)
            self._finish(live, group)
        else:
            self._lose_group(live, lost)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        """Let any error of a group's task end the run: nobody awaits the task, so the trainer would wait for the group
        for ever. Also one that is no `Exception`: Rust parts of a package raise panics, and user code may cancel its
        own task.
        """
        self._tasks.discard(task)
        try:
            error = task.exception()
        except asyncio.CancelledError as cancelled:
            error = cancelled
        if error is not None:
            self.fail(to_exception(error))

    def _finish(self, live: _LiveGroup, group: TrajectoryGroup) -> None:
        is_replaced = self._is_replaced(group)
        live.group = group
        self._num_finished += 1
        live.oldest_version = min(group.sampled_versions, default=live.oldest_version)
        live.effort.num_ids = group.num_sampled
        self._end_lane(live, SAMPLED, "finished")
        self.timeline.begin_lane(QUEUED, live.number, ids=live.effort.num_ids, version=live.oldest_version)
        if is_replaced:
            self._replace(live, group)
        elif self._is_too_old(live, self._next_version):
            self._drop(live)
        self.fill()
        self._changed.set()

    def _replace(self, live: _LiveGroup, group: TrajectoryGroup) -> None:
        self._remove(live)
        self.numbers.mark_replaced(live.number)
        self._record(live)
        self._replaced[live.number] = group
        self._end_lane(live, QUEUED, "replaced")

    def _drop(self, live: _LiveGroup) -> None:
        self._remove(live)
        self.numbers.put_back(live.number)
        self._counts += GroupCounts(num_dropped=1, num_dropped_ids=live.effort.num_ids)
        self._end_lane(live, QUEUED, "dropped")

    def _lose_group(self, live: _LiveGroup, error: EngineError) -> None:
        self._remove(live)
        self.numbers.put_back(live.number)
        self._counts += GroupCounts(num_lost=1, num_lost_ids=live.effort.num_ids)
        self._end_lane(live, SAMPLED, "lost")
        # One that was started before an outage that is over says nothing of the engine as it is now.
        if live.has_seen_outages == self._num_outages:
            self.lose(error)
        self.fill()

    def _remove(self, live: _LiveGroup) -> None:
        self._live.remove(live)
        self._num_finished -= live.is_finished

    def _record(self, live: _LiveGroup) -> None:
        """Let the source take note, whose error ends the run in all processes."""
        assert live.group is not None, "it is finished"
        try:
            self.source.record(live.number, live.group)
        except Exception as error:
            self.fail(error)

    def get_state(self) -> Mapping[str, Any]:
        """Which groups are trained and what the source has chosen, both of this moment, for the checkpoint."""
        try:
            choices = self.source.choices()
        except Exception as error:
            self.fail(error)
            choices = None
        return {**({} if choices is None else {"choices": copy.deepcopy(choices)}), **self.numbers.state()}

    def _is_replaced(self, group: TrajectoryGroup) -> bool:
        """Whether a group has equal rewards, and the next step may still replace one."""
        may_replace = len(self._replaced) < self.config.get_max_replaced(self.source.groups_per_step)
        return may_replace and not self.has_variance(group)

    def _is_in_time(self) -> bool:
        """Whether a group that starts now, behind the live ones, can be trained before it is too old."""
        trained_at = self._next_version + len(self._live) // self.source.groups_per_step
        return trained_at - self.engine_version <= self.config.max_staleness

    def _get_oldest_allowed(self, version: int) -> int:
        """The oldest version that an id may have which is trained at this one."""
        return version - self.config.max_staleness

    def _is_too_old(self, live: _LiveGroup, version: int) -> bool:
        """Whether the group may not be trained at this version or later."""
        return live.oldest_version < self._get_oldest_allowed(version)

    def _find_oldest_usable(self, live: _LiveGroup) -> int:
        """The oldest version of its ids; one that is older than its start, and too old, is of an engine left behind."""
        return min(live.oldest_version, self._get_oldest_allowed(self._next_version))

    @property
    def _is_ahead(self) -> bool:
        return self.config.max_staleness > 0

    @property
    def _highest_limit(self) -> int:
        """What the staleness bound allows."""
        return (self.config.max_staleness + 1) * self.source.groups_per_step

    def _choose(self, version: int) -> list[_LiveGroup] | None:
        """Choose the finished groups of a step that begins with `version`; None if it must wait.

        The oldest come first, in the order of their start among equals. The step waits if it would leave more groups
        than the steps after it can take in time: a slow group is waited for, and never overtaken until it is too old.
        """
        per_step = self.source.groups_per_step
        if self.num_queued < per_step:
            return None
        finished = [live for live in self._live if live.is_finished]
        chosen = sorted(finished, key=lambda live: live.oldest_version)[:per_step]
        left = set(self._live) - set(chosen)
        # Once nothing is in flight, waiting helps no group. A server that has missed an update may sample with its
        # older weights as long as the bound allows, and finish more than the next steps can take in time: a run that
        # waited for these hung for ever. They are dropped when they are too old.
        must_wait = self.num_in_flight > 0 and not self._is_feasible(left, version + 1)
        return None if must_wait else chosen

    def _is_feasible(self, groups: Collection[_LiveGroup], version: int) -> bool:
        """Whether the steps from `version` on can take all of these groups in time: the earliest due come first."""
        due = sorted(live.oldest_version + self.config.max_staleness - version for live in groups)
        per_step = self.source.groups_per_step
        return all(steps >= 0 and place < (steps + 1) * per_step for place, steps in enumerate(due))

    def _adapt_limit(self, *, waited: float) -> None:
        """Adapt the limit when the groups of a step are taken, to the share of the time that was waited for them."""
        per_step = self.source.groups_per_step
        self._num_steps += 1
        if waited > _WAITED:
            self._too_low, self._num_steps = self._limit, 0
            self._limit = min(self._limit + per_step, self._highest_limit)
        elif self.num_queued >= _READY * per_step:
            fallen = self._limit - math.ceil(_FALL * per_step)
            if fallen >= per_step and (fallen > self._too_low or self._num_steps > _REMEMBERED):
                self._limit = fallen

    def _hold(self, is_held: bool) -> None:
        """Show whether no group starts: it would be too old when its turn comes, or enough are on their way."""
        if is_held == self._is_held:
            return
        self._is_held = is_held
        self.idle.set(held=int(is_held))
        if is_held:
            self.timeline.begin(Track.SAMPLER, "held by the staleness bound")
        else:
            self.timeline.end(Track.SAMPLER)

    def _end_lane(self, live: _LiveGroup, name: str, fate: str, **more: Any) -> None:
        """Show what became of a group."""
        ids, version = live.effort.num_ids, live.oldest_version
        self.timeline.end_lane(name, live.number, fate=fate, ids=ids, version=version, **more)
        self._show_counts()

    def _show_counts(self) -> None:
        self.idle.set(in_flight=self.num_in_flight, queued=self.num_queued)
        self.timeline.count("groups in flight", groups=self.num_in_flight)
        self.timeline.count("groups in the queue", groups=self.num_queued)


def _build_rows(group: TrajectoryGroup) -> None:
    """Let each tree of the group build the rows that it keeps."""
    for member in group.trajectories:
        _ = member.tree.rows
