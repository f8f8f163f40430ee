"""A step of training on one page, from prompts to published weights, in the order in which it happens.

    take groups ── units ── update ── checkpoint, if due ── publish ── metrics ── what comes after
         ▲                                                     │
    queue: prompts ── groups in flight ── finished             └──► engine

    group      the rollouts of one problem (`TrajectoryGroup`)
    row        ids with their masks, logprobs and advantages (`TrainingSample`)
    unit       rows that the objective trains together: those of a rollout, or of a pair. A unit without
               gradient, as of equal rewards, has none, or idle ones, which count in the loss's divisor
    version    of the weights: `Trainer.step` adds one to `trainer.policy_version`; a publication gives that number
               and its weights to the engine, which names it with each id that it samples

With `max_staleness` 0 groups are sampled only while the step waits for them, and the weights are published before the
next ones. Above 0 the same lines run, but the queue samples ahead while a step is made, as far as the bound allows, and
a copy of the weights is published beside the next step. No line here looks at the age of an id: `GroupQueue` decides
which group may start (`_is_in_time`) and which is too old (`_is_too_old`), and the step tells it the next version.

A run that is ended early continues from its newest checkpoint, and makes the steps after that again:

    Ctrl-C, SIGTERM    cancel the line that waits. Groups in flight and a publication beside the step are given up, a
                       checkpoint that is being written is finished, and none is begun (`loop._closing`)
    SIGKILL            at any line, also while the weights are published: engines of this package sample nothing with a
                       part of them
    the same command   takes a version above that of an engine with later weights (`loop._resume`), publishes the
                       checkpoint's weights, and does again what follows its step (`loop._end_again`)

Of several processes each makes the step with its own groups. They meet where all of them make the same calls of
`training.waits`, of the trainer, of `Publication`, of `Outages` or of `GroupQueue.meet`, in the same order. What runs
beside a step (sampling, a publication that was begun) makes no such call: another process may be in the middle of its
step. If it fails, the error is kept until they meet: an engine that is gone is waited for there, anything else is
raised in all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial, reduce
from operator import add
from typing import Any

from torch.profiler import record_function

from unbroken.counters import Counters, Event
from unbroken.errors import RolloutError
from unbroken.rollout.failures import format_error, format_frames
from unbroken.timeline import Timeline, Track
from unbroken.training.checkpoints import Checkpoints, LastStep, find_checkpoints
from unbroken.training.config import LoopConfig
from unbroken.training.metrics.rollouts import RolloutNumbers, rollout_metrics
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.metrics.step_log import StepLog, loop_time_s
from unbroken.training.metrics.writer import Metrics, MetricsWriter
from unbroken.training.objective.samples import DropReason
from unbroken.training.observer import RunObserver, StepRollouts
from unbroken.training.outages import Outages
from unbroken.training.publication import Publication
from unbroken.training.queue import GroupCounts, GroupQueue, StepGroups
from unbroken.training.trainer import Trainer
from unbroken.training.untrained import UntrainedRows, compare_untrained, explain_empty, make_empty_error
from unbroken.training.waits import fail_together, from_all_processes, raise_together
from unbroken.training.warm_start import WarmStart
from unbroken.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepUnits:
    """What a process trains on in one step."""

    units: Sequence[Any]
    """Of the groups that are trained on; `Objective.get_rows` has the rows of each."""
    untrained: Sequence[Sequence[TrainingSample]]
    """Rows that are not trained on: of each rollout without gradient, and of each of a group that was replaced."""
    num_trained: int
    """Units that have rows."""
    counters: Counters
    """Of this process's rollouts, and of what is not trained on, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """What a process tells the others of its step, before the update."""

    numbers: RolloutNumbers
    counts: GroupCounts
    has_rows: bool
    """Whether it has any to train on."""
    num_failed: int
    first_failure: str | None


@dataclass(slots=True, kw_only=True)
class StepRunner:
    """Makes the steps of one run, one after the other. All processes call its methods together."""

    trainer: Trainer
    queue: GroupQueue
    publication: Publication
    outages: Outages
    config: LoopConfig
    checkpoints: Checkpoints | None
    metrics: MetricsWriter | None
    observer: RunObserver
    timeline: Timeline
    log: StepLog
    last: LastStep | None
    """The last step that was made."""
    warm_start: WarmStart | None = None
    num_empty: int = field(init=False, default=0)
    """Steps in a row that trained no row, since the run was started."""

    @property
    def num_made(self) -> int:
        """How many steps the run has made."""
        return 0 if self.last is None else self.last.num_steps

    async def run(self) -> None:
        """Make the steps that are left of the run.

        Raises:
            RolloutError: every rollout of a step failed, and the first one's error is its cause; or
                `config.max_empty_steps` steps in a row taught nothing.
            OutageError, CheckpointError: as in `open_steps`.
        """
        for step in range(self.num_made, self.config.num_steps):
            with self.observer.around_step(step):
                await self.run_step(step)

    async def run_step(self, step: int) -> None:
        """Make a step. Its groups are in memory until the weights are updated, not while the next ones are waited for.

        An engine may die at any line:

            while a group is sampled    the group is lost, and sampled again as a whole once the engine is back; the
                                        wait is in `_take_groups`
            after that, before the      the step has all it needs: it is trained once, the version rises, and what is
            weights are published       due of checkpoints is written. Groups that are sampled ahead are lost, as above
            when they are published     all of the trainer's weights are sent again until the engine is back and has
                                        taken them; the wait is in `Publication.publish`, or with `max_staleness`
                                        above 0 where the processes meet next
            if it stays away            after `OutageConfig.wait_s`, or after `max_losses` losses in one wait, the run
                                        ends with an `OutageError`. The loop then writes a checkpoint of the last step
                                        that was made, due or not, and the same command continues from there
        """
        version = self.trainer.policy_version
        if self._is_supervised(step):
            state = await self._supervise(step)
        else:
            with record_function("rollouts"):
                groups = await self._take_groups(step)
            with record_function("train"):
                await self._update(groups, await self._make_units(groups))
            state = groups.state
            del groups  # no name keeps them, or their rows, beyond the update
        # A checkpoint that is due is begun before any engine has the new weights. So a run that is killed from here on
        # continues after this step once its checkpoint is whole; until then after an earlier one, with a version above
        # the engine's (`loop._resume`), so that no version ever stands for two weights.
        await self._save_if_due(step, state)
        self.log.end_making()
        self.timeline.end(Track.TRAINER)
        self.timeline.count("version, trainer", version=self.trainer.policy_version)
        if self.trainer.policy_version == version:
            self.queue.set_next_version(version)  # nothing was trained; the queue expected one version more
        elif self.samples_nothing(step + 1):
            pass  # nothing samples with these weights: of the supervised steps only the last one's are published
        elif self.config.max_staleness == 0:
            # If the engine is gone, this waits until it is back and has taken the weights; if the loop was given no
            # engine to wait for, the run ends at once.
            await self.publication.publish()
        else:
            # If the engine is gone, the publication fails beside the next step, and from then on no group starts. The
            # processes wait for the engine where they meet next, together: in `_take_groups` of the next step, or in
            # `Publication.end`. None may wait alone while the others compute.
            await self.publication.begin()
        if self.observer.needs_engine(step + 1):
            await self.publication.end()  # an evaluation after this step samples with its weights
        await self.end(step, self.log.end_step())

    def _begin(self, step: int, *, waited_s: float, since_last_s: float) -> None:
        """Note that the step has all that it trains on."""
        self.log.begin(waited_s, since_last_s=since_last_s, lost=self.outages.take_metrics())
        self.timeline.begin(Track.TRAINER, f"step {step}", version=self.trainer.policy_version)

    def _is_supervised(self, step: int) -> bool:
        """Whether the step trains on supervised rows alone."""
        # After the last step of a run there is none, also where the warm start has more.
        return self.warm_start is not None and step < min(self.warm_start.num_steps, self.config.num_steps)

    def samples_nothing(self, num_steps: int) -> bool:
        """Whether nothing is sampled with the weights after so many steps, because another supervised one follows."""
        return self._is_supervised(num_steps) and not self.observer.needs_engine(num_steps)

    async def _supervise(self, step: int) -> Mapping[str, Any]:
        """Make a step of the warm start, for which nothing is sampled; returns which groups are trained, for the
        checkpoint.
        """
        assert self.warm_start is not None, "the step is one of its steps"
        trainer, rows = self.trainer, self.warm_start.take(step)
        self._begin(step, waited_s=0.0, since_last_s=0.0)
        # One that has the newest weights may be awake; one without them has slept since the step before.
        if self.observer.before_update is not None and self.queue.engine_version == trainer.policy_version:
            with self.log.span("sleep"):
                async with fail_together(trainer):
                    await self.observer.before_update()
        supervise = partial(trainer.supervise, rows, learning_rate=self.warm_start.learning_rate)
        with record_function("train"), self.timeline.span("train", rows=len(rows)):
            self.log.end_update(await asyncio.to_thread(supervise))
        self.queue.set_next_version(trainer.policy_version)
        return self.queue.get_state()

    async def _take_groups(self, step: int) -> StepGroups:
        """Wait until every process has its groups for the step, which then begins; engines that went away are waited
        for together.

        A process comes to the meeting once it has its groups, has lost its engine, or has failed: nobody waits for one
        that cannot come. A group that lost its engine is sampled again as a whole: long rollouts are lost first, and
        without them it would be biased.
        """
        version, started, lost = self.trainer.policy_version, loop_time_s(), None
        for _ in range(self.config.outages.max_losses):
            chosen = await self.queue.wait(step, version)
            lost = self.queue.lost
            if not await self.queue.meet(self.trainer):  # no process has lost its engine
                assert chosen is not None, "it waits until there are groups, or something is wrong"
                waited_s = loop_time_s() - started
                groups = self.queue.take(chosen, step, next_version=version + 1)
                await raise_together(self.trainer, self.queue.failure)  # of a source that takes note of its groups
                self._begin(step, waited_s=waited_s, since_last_s=groups.since_last_s)
                return groups
            await self.publication.recover()
        raise self.outages.make_final_error(lost) from lost

    async def _make_units(self, groups: StepGroups) -> _StepUnits:
        """Make units of the groups. Nothing is left out silently: what is not trained on is counted, by its reason."""
        trainer, objective, counters = self.trainer, self.trainer.objective, Counters()
        for group in groups.sampled:
            counters.merge(group.counters)
        replaced: Sequence[Any] = ()
        with self.log.span("units"):
            async with fail_together(trainer):
                units = await trainer.make_units(groups.groups, counters)
                if self.config.replaces_groups:
                    replaced = await trainer.make_units(groups.replaced, counters)
        get_rows, get_idle = objective.get_rows, objective.get_idle_rows
        untrained = [rows for unit in units if (rows := get_idle(unit))]
        untrained += [rows for unit in replaced if (rows := get_idle(unit) or get_rows(unit))]
        # `make_units` has counted the units that have no rows. A group is replaced because its rewards are equal, and
        # what rows it has are left out here.
        num_left_out = sum(bool(get_rows(unit)) for unit in replaced)
        counters.count(Event.DROPPED_ROW, DropReason.NO_VARIANCE, times=num_left_out)
        num_trained = sum(bool(get_rows(unit)) for unit in units)
        return _StepUnits(units=units, untrained=untrained, num_trained=num_trained, counters=counters)

    async def _meet(self, groups: StepGroups, made: _StepUnits) -> tuple[bool, Metrics]:
        """Meet the other processes before the update: whether any has a row to train, and the metrics of all rollouts.

        With `max_staleness` these also say, since the step before, what became of the groups of all processes and for
        which share of the time trainer and sampler of this one were idle.
        """
        failed = [each.error for group in groups.sampled for each in group.trajectories if each.error is not None]
        own = _Report(
            numbers=RolloutNumbers.of(groups.groups, made.counters, replaced=groups.replaced),
            counts=groups.counts,
            has_rows=made.num_trained > 0,
            num_failed=len(failed),
            first_failure=format_error(failed[0]) + format_frames(failed[0]) if failed else None,
        )
        reports = await from_all_processes(self.trainer, own)
        self._check_some_succeeded(groups.step, reports, cause=failed[0] if failed else None)
        numbers = RolloutNumbers.merge([report.numbers for report in reports])
        found = rollout_metrics(numbers, collect_s=self.log.sampling_s)
        if self.config.max_staleness > 0:
            counts = asdict(reduce(add, [report.counts for report in reports]))
            found = {**found, **{f"sampler/{name}": count for name, count in counts.items()}, **groups.idle}
        is_trained = any(report.has_rows for report in reports)
        return is_trained, {**found, **self.trainer.objective.get_metrics(made.units)}

    def _check_some_succeeded(self, step: int, reports: Sequence[_Report], cause: BaseException | None) -> None:
        """Warn of failed rollouts; raise if all of all processes failed, or such a run would silently train nothing."""
        firsts = [report.first_failure for report in reports if report.first_failure is not None]
        if not firsts:
            return
        num_failed = sum(report.num_failed for report in reports)
        num_rollouts = sum(len(report.numbers.turns) for report in reports)
        words = f"rollouts of step {step} failed, the first with {firsts[0]}"
        if num_failed == num_rollouts:
            raise RolloutError(f"all {num_failed} {words}") from cause
        if self.trainer.is_main_process:
            self.observer.warn(f"{num_failed} of {num_rollouts} {words}")

    async def _update(self, groups: StepGroups, made: _StepUnits) -> None:
        """Update the weights, unless no process has a row to train.

        The trainer scores what it trains on, and refuses rows whose logprobs say that another policy than their
        version's sampled them (I9). Some of the rows that it does not train on are scored for the same reason, before
        the weights change: a sampler that speaks garbage earns no rewards, so none of its rows would be trained on, and
        none compared.
        """
        trainer, log, num_scored = self.trainer, self.log, self.config.num_zero_variance_scored
        with log.span("metrics"):
            is_trained, found = await self._meet(groups, made)
        if is_trained and self.observer.before_update is not None:
            with log.span("sleep"):  # what `before_update` does: an engine sleeps, and lends the trainer its memory
                async with fail_together(trainer):
                    await self.observer.before_update()
        untrained = UntrainedRows(trainer=trainer, rows=made.untrained, num_scored=num_scored)
        rollouts = StepRollouts(
            step=groups.step,
            groups=groups.sampled,
            units=made.units,
            counters=made.counters,
            is_trained=is_trained,
            score=untrained.score,
        )
        with log.span("records"):
            await self.observer.on_rollouts(rollouts)
        if is_trained:
            with log.span("score"):
                scored = await asyncio.to_thread(untrained.compare)
            train = partial(trainer.step, made.units)
            if self.warm_start is not None and self.warm_start.weight > 0:
                rows = self.warm_start.take(groups.step)
                train = partial(trainer.step, made.units, supervised=rows, weight=self.warm_start.weight)
            with self.timeline.span("train", units=made.num_trained):
                trained = step_metrics(await asyncio.to_thread(train))
            trained = {**trained, **scored.get_metrics(trained)}
        else:
            with log.span("score"):
                compare = partial(compare_untrained, trainer, groups.sampled, num_scored=num_scored)
                compared = await asyncio.to_thread(compare)
            trained = {"train/num_rows": 0, "train/policy_version": trainer.policy_version, **compared}
        self.num_empty = 0 if is_trained else self.num_empty + 1
        log.end_update({**found, **trained})

    async def _save_if_due(self, step: int, state: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint, if one is due.

        It holds which groups were trained up to this step (`StepGroups.state`, of when they were taken), not what the
        queue has finished since: that is sampled again after a kill.
        """
        num_steps = step + 1
        self.last = LastStep(num_steps=num_steps, metrics=self.log.metrics, groups=state)
        if self.checkpoints is None:
            return
        started = time.perf_counter()
        if await asyncio.to_thread(self.checkpoints.agree_if_due, self.trainer, num_steps, last=self.config.num_steps):
            with self.timeline.span("checkpoint"):
                await self.observer.settle()
                await asyncio.to_thread(self.checkpoints.save, self.trainer, self.last)
        self.log.end_checkpoint(time.perf_counter() - started)

    async def end(self, step: int, logged: Metrics) -> None:
        """Write the step's metrics; then do what comes after a step, such as an evaluation, and again if it lost
        rollouts.
        """
        with self.log.span("log"):
            async with fail_together(self.trainer):
                if self.metrics is not None:
                    with self.timeline.span("log"):
                        await asyncio.to_thread(self.metrics.write, step, logged)
                self.observer.on_step(step, logged)
        with record_function("after step"), self.timeline.span("after the step"), self.log.span("after_step"):
            await self.outages.repeat(partial(self.observer.after_step, step + 1))
        self.log.end_after_step(self.outages.take_metrics())
        if self.num_empty > 0:
            await self._report_empty(step, logged)

    async def _report_empty(self, step: int, logged: Metrics) -> None:
        """Warn of a step that trained no row; end the run if too many did in a row."""
        reasons = explain_empty(logged)
        if self.trainer.is_main_process:
            self.observer.warn(f"step {step} trained nothing: {reasons}")
        if self.num_empty == self.config.max_empty_steps:
            newest = None
            await self.observer.settle()
            if self.checkpoints is not None:
                await asyncio.to_thread(self.checkpoints.save_last, self.trainer, self.last)
                newest = find_checkpoints(self.checkpoints.folder)[step + 1]
            raise make_empty_error(reasons, self.config, newest)
