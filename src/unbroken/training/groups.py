"""The groups of one process: what samples them, which are trained, and which are in flight or wait for their step.

    number ── may start? ──► in flight ──► finished ──► taken by a step
      ▲                         │ cancelled     │ dropped: too old for the next step; or replaced by another number
      └─────────────────────────┴───────────────┘
                                 lost: its engine went away

All of it happens in the event loop's thread: whatever changes calls `fill`, which starts what may start.

A checkpoint holds what was *trained* (or replaced: that is done, too), not what was sampled:

    trained 0 1 2 4, in flight 3 5, finished 6        state: next 3, beyond it 4
    after a kill 3 is sampled next, then 5, 6, 7
"""

from __future__ import annotations

import asyncio
import copy
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from unbroken.counters import Effort, count_effort
from unbroken.errors import CheckpointError, EngineError
from unbroken.rollout.failures import must_propagate, to_exception
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.config import LoopConfig
from unbroken.training.observer import EventKind, LoopEvent
from unbroken.training.sums import Sums

_WAITED = 0.01
"""The share of a step's time from which on the trainer has waited."""
_FALL = 1 / 8
_REMEMBERED = 32
"""Steps for which a limit is remembered as too low."""
_READY = 1 / 4
"""The share of a step's groups that must be ready besides its own before the limit falls."""


@runtime_checkable
class GroupSource(Protocol):
    """Samples the groups of one process, numbered 0, 1, 2, ... without end; each is trained once
    (`runs.collector.Collector` is one).

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


class GroupNumbers:
    """The numbers 0 to `stop` - 1, each of which is trained once; and for each that is replaced, one more."""

    def __init__(self, stop: int, *, chooser: ChoosingSource | None = None) -> None:
        """`chooser` is the source, if it chooses the problems."""
        self._chooser = chooser
        self._num_to_train = stop
        self._num_replaced = 0
        self._fresh = 0
        """The lowest number that was never given out."""
        self._again: list[int] = []
        """A heap of numbers to give out again."""
        self._lowest = 0
        """All numbers below are trained."""
        self._beyond: set[int] = set()
        """The others that are trained."""
        self._drops: dict[int, int] = {}

    @classmethod
    def of(
        cls, source: GroupSource, *, num_steps: int, num_made: int = 0, state: Mapping[str, Any] | None = None
    ) -> GroupNumbers:
        """The numbers of a source's groups for so many steps, of which `num_made` are made.

        `state` is that of the checkpoint; without one, the lowest numbers were trained in their order. The steps that
        are left have the source's number of groups, however many those before had.

        Raises:
            CheckpointError: as `restore` does.
        """
        numbers = cls(0, chooser=source if isinstance(source, ChoosingSource) else None)
        numbers.restore(state or {"next": num_made * source.groups_per_step, "beyond": [], "drops": []})
        num_trained = numbers._lowest + len(numbers._beyond) - numbers._num_replaced
        numbers._num_to_train = num_trained + (num_steps - num_made) * source.groups_per_step
        return numbers

    @property
    def has_next(self) -> bool:
        """Whether there is a number to give out."""
        return bool(self._again) or self._fresh < self._stop

    def take_next(self) -> int:
        """Give out the lowest number that is neither trained nor given out; there must be one (`has_next`)."""
        if self._again:
            return heapq.heappop(self._again)
        assert self._fresh < self._stop, "has_next says whether there is one"
        self._fresh += 1
        return self._fresh - 1

    def put_back(self, number: int) -> None:
        """Give the number out again, before higher ones."""
        heapq.heappush(self._again, number)

    def count_drop(self, number: int) -> None:
        """Count that a group was too old."""
        self._drops[number] = self.num_drops(number) + 1

    def num_drops(self, number: int) -> int:
        """How often the group was too old."""
        return self._drops.get(number, 0)

    def mark_trained(self, numbers: Iterable[int]) -> None:
        """These are trained, and never given out again."""
        self._beyond.update(numbers)
        while self._lowest in self._beyond:
            self._beyond.remove(self._lowest)
            self._lowest += 1
        self._drops = {number: count for number, count in self._drops.items() if not self._is_trained(number)}

    def tell(self, number: int, group: TrajectoryGroup) -> None:
        """Tell the source that a group is trained or replaced, if it chooses by that."""
        if self._chooser is not None:
            self._chooser.tell(number, group)

    def mark_replaced(self, number: int) -> None:
        """It teaches nothing and is never given out again; there is one more number in its place."""
        self._num_replaced += 1
        self.mark_trained([number])

    def state(self) -> Mapping[str, Any]:
        """What is trained, in types that JSON can hold."""
        drops = sorted(self._drops.items())
        choices = {} if self._chooser is None else {"choices": copy.deepcopy(self._chooser.choices())}
        return {
            **choices,
            "next": self._lowest,
            "beyond": sorted(self._beyond),
            "drops": [list(pair) for pair in drops],
            "num_replaced": self._num_replaced,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: what is not trained is given out again.

        Raises:
            CheckpointError: its problems were chosen, and the source does not choose.
        """
        choices = state.get("choices")
        if choices is not None and self._chooser is None:
            raise CheckpointError("the run began with a curriculum and cannot continue without: give it the same")
        if choices is not None and self._chooser is not None:
            self._chooser.restore_choices(copy.deepcopy(choices))
        self._lowest, self._beyond = state["next"], set(state["beyond"])
        self._drops = dict(state["drops"])
        self._num_replaced = state.get("num_replaced", 0)
        self._fresh = max((number + 1 for number in self._beyond), default=self._lowest)
        self._again = [number for number in range(self._lowest, self._fresh) if number not in self._beyond]

    @property
    def _stop(self) -> int:
        return self._num_to_train + self._num_replaced

    def _is_trained(self, number: int) -> bool:
        return number < self._lowest or number in self._beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts(Sums):
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
    counts: GroupCounts
    waited_s: float
    """How long the trainer waited for them."""
    since_last_s: float
    """Since the groups of the step before were taken, or the loop began."""
    numbers: Mapping[str, Any]
    """Which groups are trained after this step, for the checkpoint (`GroupNumbers.state`)."""
    replaced: Sequence[TrajectoryGroup] = ()
    """Groups whose rewards are all equal, instead of which others were sampled since the step before."""

    @property
    def sampled(self) -> Sequence[TrajectoryGroup]:
        """All groups, the replaced ones last."""
        return [*self.groups, *self.replaced]


class FindsLoss(Protocol):
    """Tells groups that an engine lost from those that can be used. It communicates with no other process."""

    async def find_loss(self, groups: Sequence[TrajectoryGroup], *, oldest_version: int) -> EngineError | None:
        """The error if the engine went away, or has ids older than `oldest_version`; None if the groups can be used."""
        ...

    async def is_outage(self, error: EngineError) -> bool:
        """Whether an error says that the engine went away; otherwise it refused a request."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class LiveGroup:
    """A group in flight, or finished and not yet taken."""

    number: int
    oldest_version: int
    """Version of its oldest id; while it is in flight, that of the engine when it started."""
    is_protected: bool
    """Whether the trainer waits for it, rather than making a step after which it would be too old."""
    has_seen_outages: int
    """Outages before it was started."""
    effort: Effort = field(default_factory=Effort)
    group: TrajectoryGroup | None = None
    task: asyncio.Task[None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether it can be taken."""
        return self.group is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The staleness bound of one process: which groups may start, which are trained next, and which are too old.

    A group whose oldest id was sampled by version a may be trained at the versions a, a + 1, ..., a + S, and is too old
    from then on. With P groups a step, and i groups before it that are not yet taken, a new group is trained i // P
    steps after the next one. It starts only if that is in time, so S also bounds the groups that wait.

    Worked example, S = 1 and P = 2, the engine has version 4:

        the next step has version 4    groups 0 1 are trained at 4, groups 2 3 at 5, group 4 would be at 6: it waits
        the next step has version 5    groups 0 1 are trained at 5: group 2 waits until the engine has version 5
    """

    max_staleness: int
    groups_per_step: int
    max_lag: int = 0
    """How many versions older than the step the ids may be whose engine did not take the newest weights."""

    def may_start(self, num_live: int, *, next_version: int, engine_version: int) -> bool:
        """Whether a group that starts now behind `num_live` others can be trained in time.

        `next_version` is the version that the next step begins with, at the latest.
        """
        return next_version + num_live // self.groups_per_step - engine_version <= self.max_staleness

    def is_too_old(self, group: LiveGroup, version: int) -> bool:
        """Whether the group may not be trained at this version or later."""
        return version - group.oldest_version > max(self.max_staleness, self.max_lag)

    def choose(self, live: Sequence[LiveGroup], version: int) -> list[LiveGroup] | None:
        """Choose the finished groups of a step that begins with `version`; None if it must wait.

        The oldest come first, in the order of `live` among equals. The step waits for protected groups if it would
        leave more of them than the steps after it can take in time.
        """
        finished = [group for group in live if group.is_finished]
        if len(finished) < self.groups_per_step:
            return None
        oldest_first = sorted(finished, key=lambda group: group.oldest_version)
        protected_first = sorted(oldest_first, key=lambda group: not group.is_protected)
        for order in (oldest_first, protected_first):
            chosen = order[: self.groups_per_step]
            left = [group for group in set(live) - set(chosen) if group.is_protected]
            if self._is_feasible(left, version + 1):
                return chosen
        return None

    def _is_feasible(self, groups: Sequence[LiveGroup], version: int) -> bool:
        """Whether the steps from `version` on can take all of these groups in time."""
        due = sorted(group.oldest_version + self.max_staleness - version for group in groups)
        return all(steps >= 0 and index < (steps + 1) * self.groups_per_step for index, steps in enumerate(due))


@dataclass(slots=True, kw_only=True)
class Pace:
    """How far ahead one process samples: no further than keeps its trainer busy, as each group that waits grows older.

    The limit of groups that are in flight or wait rises by a step's groups after each step that the trainer waited for,
    and falls by an eighth of them after each step that found others ready besides its own. It does not fall to one that
    the trainer waited with, until 32 steps have passed since.
    """

    groups_per_step: int
    max_staleness: int
    is_adapted: bool
    """Otherwise it is always the highest that the staleness bound allows."""
    limit: int = field(init=False)
    """Groups in flight and finished."""

    _too_low: int = field(init=False, default=0)
    """The last limit that the trainer waited with."""
    _num_steps: int = field(init=False, default=0)
    """Since then."""

    def __post_init__(self) -> None:
        self.limit = 2 * self.groups_per_step if self.is_adapted else self._highest

    def end_wait(self, *, waited_s: float, since_last_s: float, num_queued: int) -> None:
        """Adapt the limit when the groups of a step are taken.

        The trainer waited `waited_s` of the `since_last_s` since it took those of the step before; `num_queued` others
        are finished.
        """
        if not self.is_adapted:
            return
        self._num_steps += 1
        if waited_s > _WAITED * since_last_s:
            self._too_low, self._num_steps = self.limit, 0
            self.limit = min(self.limit + self.groups_per_step, self._highest)
        elif num_queued >= _READY * self.groups_per_step:
            fallen = self.limit - math.ceil(_FALL * self.groups_per_step)
            if fallen >= self.groups_per_step and (fallen > self._too_low or self._num_steps > _REMEMBERED):
                self.limit = fallen

    @property
    def _highest(self) -> int:
        return (self.max_staleness + 1) * self.groups_per_step


class GroupSampler:
    """Samples the groups of each step, and ahead of the trainer as far as the staleness bound allows.

    With a bound of 0 nothing is sampled from when a step's groups are taken until the loop calls `resume`: the step is
    trained, and the engine may be used by others, or sleep.

    Worked example of groups that teach nothing, 3 groups a step, at most 3 replaced, and a bound of 0:

        sampled     4: 0 1 1    5: 1 1 1    6: 0 0 1            5 has one reward only
                                7: 0 0 0                        so has 7
                                8: 1 0 1                        trained: 4 6 8; replaced: 5 7; the next step has 9 10 11

    The same numbers are sampled in whatever order they finish.
    """

    def __init__(
        self,
        source: GroupSource,
        numbers: GroupNumbers,
        config: LoopConfig,
        *,
        losses: FindsLoss,
        observe: Callable[[LoopEvent], None],
        version: int,
        has_variance: Callable[[TrajectoryGroup], bool],
    ) -> None:
        """The trainer and the engine begin with the weights `version`. Groups without variance are replaced, as far as
        the config allows. Nothing is sampled before `resume` is called.
        """
        self.numbers = numbers
        self.window = Window(
            max_staleness=config.max_staleness, groups_per_step=source.groups_per_step, max_lag=config.max_lag
        )
        self.pace = Pace(
            groups_per_step=source.groups_per_step, max_staleness=config.max_staleness, is_adapted=config.adapt_ahead
        )
        self.changed = asyncio.Event()
        """Set when a group has finished, or `lost` or `failure` is set."""
        self.lost: EngineError | None = None
        """Why a group was lost, since the last outage that the trainer has dealt with. No group starts until then."""
        self.failure: Exception | None = None
        """An error that ends the run."""
        self._source = source
        self._config = config
        self._losses = losses
        self._observe = observe
        self._has_variance = has_variance
        self._max_replaced = config.get_max_replaced(source.groups_per_step)
        self._replaced: dict[int, TrajectoryGroup] = {}
        """By their numbers, since the step before."""
        self._is_ahead = config.max_staleness > 0
        self._is_paused = True
        self._next_version = version
        self.engine_version = version
        """The weights that all engines of this process have at least."""
        self._live: list[LiveGroup] = []
        """In the order in which they were started."""
        self._num_finished = 0
        """How many of these are. Counted: each event has it, and a step may have thousands of groups."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_outages = 0
        self._is_held = False
        self._counts = GroupCounts()

    @property
    def num_in_flight(self) -> int:
        """Groups that are being sampled."""
        return len(self._live) - self._num_finished

    @property
    def num_queued(self) -> int:
        """Groups that are finished and not yet taken."""
        return self._num_finished

    def fill(self) -> None:
        """Start the groups that may start."""
        if self._is_paused:
            return
        while self.lost is None and self.failure is None and self.numbers.has_next:
            limit = self._config.max_groups_in_flight if self._is_ahead else None
            is_needed = len(self._live) < self.pace.limit
            is_in_time = self.window.may_start(
                len(self._live), next_version=self._next_version, engine_version=self.engine_version
            )
            may_start = is_in_time and is_needed
            if self._is_ahead:
                self._hold(not may_start)
            if not may_start or (limit is not None and self.num_in_flight >= limit):
                return
            self._start(self.numbers.take_next())

    def resume(self) -> None:
        """The engine is free to sample."""
        self._is_paused = False
        self.fill()

    def set_engine_version(self, version: int) -> None:
        """All engines of this process have these weights now."""
        self.engine_version = max(self.engine_version, version)
        self.fill()

    def set_next_version(self, version: int) -> None:
        """The next step begins with these weights: end what is too old for it."""
        self._next_version = version
        for live in [live for live in self._live if self.window.is_too_old(live, version)]:
            if live.is_finished:
                self._drop(live)
            elif not live.is_protected:
                self._cancel(live)
        self.fill()

    def choose(self, version: int) -> list[LiveGroup] | None:
        """Choose the groups of a step that begins with `version`; None if it must wait."""
        return None if self.num_queued < self._source.groups_per_step else self.window.choose(self._live, version)

    def take(self, chosen: Sequence[LiveGroup], step: int) -> list[TrajectoryGroup]:
        """Take finished groups for a step, in the order of their numbers; they are trained from now on."""
        self._is_paused = not self._is_ahead
        chosen = sorted(chosen, key=lambda live: live.number)
        taken = set(chosen)
        self._live = [live for live in self._live if live not in taken]
        self._num_finished -= len(chosen)
        self.numbers.mark_trained(live.number for live in chosen)
        for live in chosen:
            self._tell(live)
            self._note_group(EventKind.GROUP_TAKEN, live, step=step)
        return [live.group for live in chosen if live.group is not None]

    def take_replaced(self) -> list[TrajectoryGroup]:
        """The groups that were replaced since the last call; as many may be replaced until the next."""
        replaced, self._replaced = self._replaced, {}
        return [replaced[number] for number in sorted(replaced)]

    def get_state(self) -> Mapping[str, Any]:
        """Which groups are trained, for the checkpoint; an error of the source ends the run in all processes."""
        try:
            return self.numbers.state()
        except Exception as error:
            self.fail(error)
            return {}

    def take_counts(self) -> GroupCounts:
        """What became of groups since the last call, and how many there are."""
        counts, self._counts = self._counts, GroupCounts()
        return counts + GroupCounts(num_queued=self.num_queued, num_in_flight=self.num_in_flight)

    def end_outage(self, version: int) -> None:
        """The engine is back, with these weights."""
        self.lost = None
        self._num_outages += 1
        self.set_engine_version(version)

    def lose(self, error: EngineError) -> None:
        """Start no more groups until the trainer has seen to the engine."""
        self.lost = self.lost or error
        self.changed.set()

    def fail(self, error: Exception) -> None:
        """End the run with this error."""
        self.failure = self.failure or error
        self.changed.set()

    async def close(self) -> None:
        """Cancel what is in flight, and wait until it has ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def note(
        self,
        kind: EventKind,
        *,
        number: int | None = None,
        step: int | None = None,
        version: int | None = None,
        num_ids: int = 0,
    ) -> None:
        """Show an event to the observer."""
        self._observe(
            LoopEvent(
                kind=kind,
                time_s=asyncio.get_running_loop().time(),
                number=number,
                step=step,
                version=version,
                num_ids=num_ids,
                num_in_flight=self.num_in_flight,
                num_queued=self.num_queued,
            )
        )

    def _start(self, number: int) -> None:
        live = LiveGroup(
            number=number,
            oldest_version=self.engine_version,
            is_protected=self.numbers.num_drops(number) >= self._config.max_drops,
            has_seen_outages=self._num_outages,
        )
        self._live.append(live)
        live.task = asyncio.create_task(self._sample(live))
        self._tasks.add(live.task)
        live.task.add_done_callback(self._tasks.discard)
        self._note_group(EventKind.GROUP_STARTED, live)

    async def _sample(self, live: LiveGroup) -> None:
        try:
            sampled = await self._sample_once(live)
            is_replaced = isinstance(sampled, TrajectoryGroup) and (
                len(self._replaced) < self._max_replaced and not self._has_variance(sampled)
            )
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            if live in self._live:
                if must_propagate(error):  # the run ends
                    raise
                self.fail(to_exception(error))
                return
            sampled, is_replaced = None, False
        try:
            if live not in self._live:  # it was cancelled, and only now have its requests left the engine
                self.numbers.put_back(live.number)
                self.fill()
            elif isinstance(sampled, TrajectoryGroup):
                self._finish(live, sampled, is_replaced=is_replaced)
            elif sampled is not None:
                self._lose_group(live, sampled)
        except Exception as error:  # the observer's; nobody else would see it
            self.fail(error)

    async def _sample_once(self, live: LiveGroup) -> TrajectoryGroup | EngineError:
        """The group, or the error that says that its engine went away."""
        try:
            with count_effort(live.effort):
                group = await self._source.sample(live.number)
        except EngineError as error:
            if not await self._losses.is_outage(error):
                raise
            return error
        return await self._find_loss(live, group) or group

    async def _find_loss(self, live: LiveGroup, group: TrajectoryGroup) -> EngineError | None:
        """Why the group cannot be used. One that is older than its start, and too old, is of an engine left behind."""
        oldest = min(live.oldest_version, self._next_version - max(self.window.max_staleness, self.window.max_lag))
        return await self._losses.find_loss([group], oldest_version=oldest)

    def _finish(self, live: LiveGroup, group: TrajectoryGroup, *, is_replaced: bool) -> None:
        live.group = group
        self._num_finished += 1
        live.oldest_version = min(group.sampled_versions, default=live.oldest_version)
        live.effort.num_ids = group.num_sampled
        self._note_group(EventKind.GROUP_FINISHED, live)
        if is_replaced:
            self._replace(live, group)
        elif self.window.is_too_old(live, self._next_version):
            self._drop(live)
        self.fill()
        self.changed.set()

    def _lose_group(self, live: LiveGroup, error: EngineError) -> None:
        self._remove(live)
        self.numbers.put_back(live.number)
        self._count(num_lost=1, num_lost_ids=live.effort.num_ids)
        self.note(EventKind.GROUP_LOST, number=live.number, num_ids=live.effort.num_ids)
        if live.has_seen_outages == self._num_outages:
            self.lose(error)
        self.fill()

    def _cancel(self, live: LiveGroup) -> None:
        self._remove(live)
        assert live.task is not None
        live.task.cancel()
        self.numbers.count_drop(live.number)
        self._count(num_cancelled=1, num_cancelled_ids=live.effort.num_ids)
        self._note_group(EventKind.GROUP_CANCELLED, live)

    def _drop(self, live: LiveGroup) -> None:
        self._remove(live)
        self.numbers.count_drop(live.number)
        self.numbers.put_back(live.number)
        self._count(num_dropped=1, num_dropped_ids=live.effort.num_ids)
        self._note_group(EventKind.GROUP_DROPPED, live)

    def _replace(self, live: LiveGroup, group: TrajectoryGroup) -> None:
        self._remove(live)
        self.numbers.mark_replaced(live.number)
        self._tell(live)
        self._replaced[live.number] = group
        self._note_group(EventKind.GROUP_REPLACED, live)

    def _remove(self, live: LiveGroup) -> None:
        self._live.remove(live)
        self._num_finished -= live.is_finished

    def _tell(self, live: LiveGroup) -> None:
        """Tell the source, whose error ends the run in all processes."""
        assert live.group is not None, "it is finished"
        try:
            self.numbers.tell(live.number, live.group)
        except Exception as error:
            self.fail(error)

    def _hold(self, is_held: bool) -> None:
        if is_held != self._is_held:
            self._is_held = is_held
            self.note(EventKind.HOLD_BEGUN if is_held else EventKind.HOLD_ENDED)

    def _note_group(self, kind: EventKind, live: LiveGroup, *, step: int | None = None) -> None:
        ids = live.effort.num_ids
        self.note(kind, number=live.number, step=step, version=live.oldest_version, num_ids=ids)

    def _count(self, **more: int) -> None:
        self._counts += GroupCounts(**more)
