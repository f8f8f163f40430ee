"""The groups of one process that are in flight or finished, and the rules by which they start, end early, and leave.

    number ── may start? ──► in flight ──► finished ──► taken by a step
      ▲                         │ cancelled     │ dropped: too old for the next step; or replaced by another number
      └─────────────────────────┴───────────────┘
                                 lost: its engine went away

All of it happens in the event loop's thread: whatever changes calls `fill`, which starts what may start.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unbroken.counters import Effort, count_effort
from unbroken.errors import EngineError
from unbroken.rollout.failures import must_propagate, to_exception
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.asynchronous.events import EventKind, LoopEvent, Observer
from unbroken.training.asynchronous.maker import FindsLoss, SamplerCounts
from unbroken.training.asynchronous.numbers import GroupNumbers
from unbroken.training.asynchronous.source import GroupSource
from unbroken.training.config import LoopConfig

_WAITED = 0.01
"""The share of a step's time from which on the trainer has waited."""
_FALL = 1 / 8
_REMEMBERED = 32
"""Steps for which a limit is remembered as too low."""
_READY = 1 / 4
"""The share of a step's groups that must be ready besides its own before the limit falls."""


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

    def may_start(self, num_live: int, *, next_version: int, engine_version: int) -> bool:
        """Whether a group that starts now behind `num_live` others can be trained in time.

        `next_version` is the version that the next step begins with, at the latest.
        """
        return next_version + num_live // self.groups_per_step - engine_version <= self.max_staleness

    def is_too_old(self, group: LiveGroup, version: int) -> bool:
        """Whether the group may not be trained at this version or later."""
        return version - group.oldest_version > self.max_staleness

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
            left = [group for group in live if group.is_protected and all(group is not each for each in chosen)]
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


class Sampler:
    """Samples ahead of the trainer, as far as the staleness bound allows."""

    def __init__(
        self,
        source: GroupSource,
        numbers: GroupNumbers,
        config: LoopConfig,
        *,
        losses: FindsLoss,
        observer: Observer,
        version: int,
        has_variance: Callable[[TrajectoryGroup], bool],
    ) -> None:
        """The trainer and the engine begin with the weights `version`. Groups without variance are replaced, as far as
        the config allows.
        """
        self.numbers = numbers
        self.window = Window(max_staleness=config.max_staleness, groups_per_step=source.groups_per_step)
        self.pace = Pace(
            groups_per_step=source.groups_per_step,
            max_staleness=config.max_staleness,
            is_adapted=config.adapt_ahead,
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
        self._observer = observer
        self._has_variance = has_variance
        self._max_replaced = config.get_max_replaced(source.groups_per_step)
        self._replaced: list[TrajectoryGroup] = []
        """Since the step before."""
        self._next_version = version
        self.engine_version = version
        """The weights that all engines of this process have at least."""
        self._live: list[LiveGroup] = []
        """In the order in which they were started."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_outages = 0
        self._is_held = False
        self._counts = SamplerCounts()

    @property
    def num_in_flight(self) -> int:
        """Groups that are being sampled."""
        return sum(not live.is_finished for live in self._live)

    @property
    def num_queued(self) -> int:
        """Groups that are finished and not yet taken."""
        return sum(live.is_finished for live in self._live)

    def fill(self) -> None:
        """Start the groups that may start."""
        while self.lost is None and self.failure is None and self.numbers.has_next:
            limit = self._config.max_groups_in_flight
            is_needed = len(self._live) < self.pace.limit
            is_in_time = self.window.may_start(
                len(self._live), next_version=self._next_version, engine_version=self.engine_version
            )
            self._hold(not (is_in_time and is_needed))
            if self._is_held or (limit is not None and self.num_in_flight >= limit):
                return
            self._start(self.numbers.take_next())

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
        return self.window.choose(self._live, version)

    def take(self, chosen: Sequence[LiveGroup], step: int) -> list[TrajectoryGroup]:
        """Take finished groups for a step, in the order of their numbers; they are trained from now on."""
        chosen = sorted(chosen, key=lambda live: live.number)
        self._live = [live for live in self._live if live not in chosen]
        self.numbers.mark_trained(live.number for live in chosen)
        for live in chosen:
            self._tell(live)
            self._note_group(EventKind.GROUP_TAKEN, live, step=step)
        return [live.group for live in chosen if live.group is not None]

    def take_replaced(self) -> list[TrajectoryGroup]:
        """The groups that were replaced since the last call; as many may be replaced until the next."""
        replaced, self._replaced = self._replaced, []
        return replaced

    def take_counts(self) -> SamplerCounts:
        """What became of groups since the last call, and how many there are."""
        counts, self._counts = self._counts, SamplerCounts()
        return counts + SamplerCounts(num_queued=self.num_queued, num_in_flight=self.num_in_flight)

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
        self._observer.observe(
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
            is_replaced = isinstance(sampled, TrajectoryGroup) and self._may_replace(sampled)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            if live in self._live:
                if must_propagate(error):  # the run ends
                    raise
                self.fail(to_exception(error))
                return
            sampled, is_replaced = None, False
        if live not in self._live:  # it was cancelled, and only now have its requests left the engine
            self.numbers.put_back(live.number)
            self.fill()
        elif isinstance(sampled, TrajectoryGroup):
            self._finish(live, sampled, is_replaced=is_replaced)
        elif sampled is not None:
            self._lose_group(live, sampled)

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
        oldest = min(live.oldest_version, self._next_version - self._config.max_staleness)
        return await self._losses.find_loss([group], oldest_version=oldest)

    def _may_replace(self, group: TrajectoryGroup) -> bool:
        return len(self._replaced) < self._max_replaced and not self._has_variance(group)

    def _finish(self, live: LiveGroup, group: TrajectoryGroup, *, is_replaced: bool) -> None:
        live.group = group
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
        self._live.remove(live)
        self.numbers.put_back(live.number)
        self._count(num_lost=1, num_lost_ids=live.effort.num_ids)
        self.note(EventKind.GROUP_LOST, number=live.number, num_ids=live.effort.num_ids)
        if live.has_seen_outages == self._num_outages:
            self.lose(error)
        self.fill()

    def _cancel(self, live: LiveGroup) -> None:
        self._live.remove(live)
        assert live.task is not None
        live.task.cancel()
        self.numbers.count_drop(live.number)
        self._count(num_cancelled=1, num_cancelled_ids=live.effort.num_ids)
        self._note_group(EventKind.GROUP_CANCELLED, live)

    def _drop(self, live: LiveGroup) -> None:
        self._live.remove(live)
        self.numbers.count_drop(live.number)
        self.numbers.put_back(live.number)
        self._count(num_dropped=1, num_dropped_ids=live.effort.num_ids)
        self._note_group(EventKind.GROUP_DROPPED, live)

    def _replace(self, live: LiveGroup, group: TrajectoryGroup) -> None:
        self._live.remove(live)
        self.numbers.mark_replaced(live.number)
        self._tell(live)
        self._replaced.append(group)
        self._note_group(EventKind.GROUP_REPLACED, live)

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
        self._counts += SamplerCounts(**more)
