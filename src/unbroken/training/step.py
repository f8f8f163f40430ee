"""A step of training on one page, from prompts to published weights, in the order in which it happens.

    take groups ── units ── update ── checkpoint, if due ── publish ── metrics ── what comes after
         ▲                                                     │
    queue: prompts ── groups in flight ── finished             └──► engine

    group      the rollouts of one problem (`TrajectoryGroup`)
    row        ids with their masks, logprobs and advantages (`TrainingSample`)
    unit       rows that the objective trains together: those of a rollout, or of a pair. It may have none.
    version    of the weights: `Trainer.step` adds one to `trainer.policy_version`; a publication gives that number
               and its weights to the engine, which names it with each id that it samples

With `max_staleness` 0 groups are sampled only while the step waits for them, and the weights are published before the
next ones. Above 0 the same lines run, but the queue samples ahead while a step is made, as far as the bound allows, and
a copy of the weights is published beside the next step.

Of several processes each makes the step with its own groups. They meet where all of them make the same calls of
`training.waits`, of the trainer or of `Outages`, in the same order. What runs beside a step (the queue, a publication)
never meets: another process may be in the middle of its step. If it fails, the error is kept until they meet, and is
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
from unbroken.errors import EngineError, RolloutError
from unbroken.rollout.failures import format_error, format_frames
from unbroken.timeline import Timeline, Track
from unbroken.training.checkpoints import Checkpoints, LastStep, find_checkpoints
from unbroken.training.config import LoopConfig
from unbroken.training.metrics.rollouts import RolloutNumbers, rollout_metrics
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.metrics.writer import Metrics, MetricsWriter
from unbroken.training.objective.samples import DropReason
from unbroken.training.observer import RunObserver, StepRollouts
from unbroken.training.outages import Outages
from unbroken.training.publication import Notices, copy_weights
from unbroken.training.queue import GroupQueue, StepGroups
from unbroken.training.step_metrics import (
    StepLog,
    compare_untrained,
    compare_zero_variance,
    explain_empty,
    loop_time_s,
)
from unbroken.training.trainer import Trainer
from unbroken.training.waits import fail_together, from_all_processes, in_any_process, log_waiting, raise_together
from unbroken.training.warm_start import WarmStart
from unbroken.types import TrainingSample
from unbroken.weights.base import WeightPublisher
from unbroken.weights.sources import WeightStream


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepUnits:
    """What a process trains on in one step."""

    units: Sequence[Any]
    """Of the groups that are trained on; `Objective.get_rows` has the rows of each."""
    untrained: Sequence[Sequence[TrainingSample]]
    """Rows that are not trained on: of each rollout without gradient, and of each of a group that was replaced."""
    counters: Counters
    """Of this process's rollouts, and of what is not trained on, by reason."""
    metrics: Metrics
    """Of the rollouts of all processes."""


@dataclass(slots=True, kw_only=True)
class StepRunner:
    """Makes the steps of one run, one after the other. All processes call its methods together."""

    trainer: Trainer
    queue: GroupQueue
    publisher: WeightPublisher | None
    outages: Outages
    config: LoopConfig
    checkpoints: Checkpoints | None
    metrics: MetricsWriter | None
    observer: RunObserver
    timeline: Timeline
    notices: Notices
    last: LastStep | None
    """The last step that was made."""
    warm_start: WarmStart | None = None
    log: StepLog = field(init=False)
    num_empty: int = 0
    """Steps in a row that trained no row, since the run was started."""
    publication: asyncio.Task[int | None] | None = None
    """Of a copy of the weights, beside the next step. Its result is the version; None after an error."""

    def __post_init__(self) -> None:
        metrics = None if self.last is None else self.last.metrics
        self.log = StepLog(is_ahead=self.config.max_staleness > 0, metrics=metrics)

    @property
    def num_made(self) -> int:
        """How many steps the run has made."""
        return 0 if self.last is None else self.last.num_steps

    async def run(self, step: int) -> None:
        """Make a step. Its groups are in memory until this returns, and not while the next ones are waited for.

        An engine may die at any line:

            while a group is sampled    the group is lost, and sampled again as a whole once the engine is back; the
                                        wait is in `_take_groups`
            after that, before the      nothing is sampled here. The step is trained once, the version rises, and a
            weights are published       checkpoint is written if one is due, as if the engine were there
            when they are published     the trainer's weights are sent until the engine is back and has taken them; the
                                        wait is in `_publish`, or with `max_staleness` above 0 where the processes meet
                                        next
            if it stays away            after `OutageConfig.wait_s`, or after `max_losses` losses in one wait, the run
                                        ends with an `OutageError`. `train` then writes a checkpoint of the last step
                                        that was made (`save_last`), due or not, and the same command continues from
                                        there
        """
        version = self.trainer.policy_version
        state = await (self._supervise(step) if self._is_supervised(step) else self._train_on_rollouts(step))
        # A checkpoint that is due is begun before any engine has the new weights. So a run that is killed from here on
        # continues after this step; or after an earlier one, with a version above the engine's (`train`), so that no
        # version ever stands for two weights.
        await self._save_if_due(step, state)
        self.log.end_making()
        self.timeline.end(Track.TRAINER)
        self.timeline.count("version, trainer", version=self.trainer.policy_version)
        if self.trainer.policy_version == version:
            self.queue.set_next_version(version)  # nothing was trained; the queue expected one version more
        elif self._samples_nothing(step + 1):
            pass  # the weights of the last supervised step are published
        elif self.config.max_staleness == 0:
            # If the engine is gone, this waits until it is back and has taken the weights; if `train` was given no
            # engine to wait for, the run ends at once.
            await self._publish()
        else:
            # If the engine is gone, the publication fails beside the next step, and from then on no group starts. The
            # processes wait for the engine where they meet next, together: in `_take_groups` of the next step, or in
            # `_end_publication`. None may wait alone while the others compute.
            await self._begin_publication()
        if self.observer.needs_engine(step + 1):
            await self._end_publication()  # an evaluation after this step samples with its weights
        await self._end(step, self.log.end_step())

    async def _train_on_rollouts(self, step: int) -> Mapping[str, Any]:
        """Sample the groups of a step, and update the weights; returns which groups are trained, for the checkpoint."""
        with record_function("rollouts"):
            groups = await self._take_groups(step)
        self.timeline.begin(Track.TRAINER, f"step {step}", version=self.trainer.policy_version)
        await self._check_some_succeeded(groups)
        with record_function("train"):
            # The update adds one to the version, if there is anything to train on. No name keeps the rows beyond it.
            await self._update(groups, await self._make_units(groups))
        return groups.state

    def _is_supervised(self, step: int) -> bool:
        """Whether the step trains on supervised rows alone."""
        return self.warm_start is not None and step < min(self.warm_start.num_steps, self.config.num_steps)

    def _samples_nothing(self, num_steps: int) -> bool:
        """Whether nothing is sampled with the weights after so many steps, because another supervised one follows."""
        return self._is_supervised(num_steps) and not self.observer.needs_engine(num_steps)

    async def _supervise(self, step: int) -> Mapping[str, Any]:
        """Make a step of the warm start, for which nothing is sampled; returns which groups are trained, for the
        checkpoint.
        """
        assert self.warm_start is not None, "the step is one of its steps"
        trainer, rows = self.trainer, self.warm_start.take(step)
        self.timeline.begin(Track.TRAINER, f"step {step}", version=trainer.policy_version)
        self.log.begin(0.0, since_last_s=0.0, lost=self.outages.take_metrics(), sampler={})
        # An engine without the newest weights has slept since the step before.
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
        """Wait until every process has its groups for the step; engines that went away are waited for together.

        A process comes to the meeting once it has its groups, has lost its engine, or has failed: nobody waits for one
        that cannot come. A group that lost its engine is sampled again as a whole: long rollouts are lost first, and
        without them it would be biased.
        """
        version, started, lost = self.trainer.policy_version, loop_time_s(), None
        for _ in range(self.config.outages.max_losses):
            chosen = await self.queue.wait(step, version)
            lost = self.queue.lost
            if not await self._meet():
                assert chosen is not None, "it waits until there are groups, or something is wrong"
                groups = self.queue.take(chosen, step, waited_s=loop_time_s() - started, next_version=version + 1)
                await raise_together(self.trainer, self.queue.failure)  # of a source that takes note of its groups
                return groups
            await self._recover()
        raise self.outages.make_final_error(lost) from lost

    async def _check_some_succeeded(self, groups: StepGroups) -> None:
        """Warn of failed rollouts; raise if all of all processes failed, or such a run would silently train nothing."""
        num_rollouts = sum(len(group.trajectories) for group in groups.sampled)
        failed = [each.error for group in groups.sampled for each in group.trajectories if each.error is not None]
        first_here = format_error(failed[0]) + format_frames(failed[0]) if failed else None
        everyone = await from_all_processes(self.trainer, (num_rollouts, len(failed), first_here))
        rollouts, failures, firsts = zip(*everyone, strict=True)
        if sum(failures) == 0:
            return
        first = next(words for words in firsts if words is not None)
        if sum(failures) == sum(rollouts):
            cause = failed[0] if failed else None
            raise RolloutError(
                f"all {sum(failures)} rollouts of step {groups.step} failed, the first with {first}"
            ) from cause
        if self.trainer.is_main_process:
            share = f"{sum(failures)} of {sum(rollouts)} rollouts of step {groups.step} failed"
            self.observer.warn(f"{share}, the first with {first}")

    async def _make_units(self, groups: StepGroups) -> _StepUnits:
        """Make units of the groups, and the metrics of all processes' rollouts.

        Nothing is left out silently: what is not trained on is counted, by its reason.
        """
        trainer, log, counters = self.trainer, self.log, Counters()
        sampling_s = await self._begin_log(groups)
        for group in groups.sampled:
            counters.merge(group.counters)
        replaced: Sequence[Any] = ()
        with log.span("units"):
            async with fail_together(trainer):
                units = await trainer.make_units(groups.groups, counters)
                if self.config.replaces_groups:
                    replaced = await trainer.make_units(groups.replaced, counters)
        get_rows, get_idle = trainer.objective.get_rows, trainer.objective.get_idle_rows
        untrained = [rows for unit in units if (rows := get_idle(unit))]
        untrained += [rows for unit in replaced if (rows := get_idle(unit) or get_rows(unit))]
        # `make_units` has counted the units that have no rows. A group is replaced because its rewards are equal, and
        # what rows it has are left out here.
        num_left_out = sum(bool(get_rows(unit)) for unit in replaced)
        counters.count(Event.DROPPED_ROW, DropReason.NO_VARIANCE, times=num_left_out)
        with log.span("metrics"):
            numbers = RolloutNumbers.of(groups.groups, counters, replaced=groups.replaced)
            everyone = RolloutNumbers.merge(await from_all_processes(trainer, numbers))
            found = {**rollout_metrics(everyone, collect_s=sampling_s), **trainer.objective.get_metrics(units)}
        return _StepUnits(units=units, untrained=untrained, counters=counters, metrics=found)

    async def _update(self, groups: StepGroups, made: _StepUnits) -> None:
        """Update the weights, unless no process has a row to train.

        The trainer scores what it trains on, and refuses it if the sampler had another policy. Some of the rows that it
        does not train on are scored for the same reason, before the weights change: a sampler that speaks garbage earns
        no rewards, so none of its rows would be trained on, and none compared.
        """
        trainer, log, num_scored = self.trainer, self.log, self.config.num_zero_variance_scored
        num_trained = sum(bool(trainer.objective.get_rows(unit)) for unit in made.units)
        is_trained = await in_any_process(trainer, num_trained > 0)
        if is_trained and self.observer.before_update is not None:
            with log.span("sleep"):  # what `before_update` does: an engine sleeps, and lends the trainer its memory
                async with fail_together(trainer):
                    await self.observer.before_update()
        rollouts = StepRollouts(
            step=groups.step, groups=groups.sampled, units=made.units, counters=made.counters, is_trained=is_trained
        )
        with log.span("records"):
            await self.observer.on_rollouts(rollouts)
        if is_trained:
            with log.span("score"):
                scored = await asyncio.to_thread(compare_zero_variance, trainer, made.untrained, num_scored=num_scored)
            beside: dict[str, Any] = {}
            if self.warm_start is not None and self.warm_start.weight > 0:
                beside = {"supervised": self.warm_start.take(groups.step), "weight": self.warm_start.weight}
            with self.timeline.span("train", units=num_trained):
                trained = step_metrics(await asyncio.to_thread(trainer.step, made.units, **beside))
            trained = {**trained, **scored.get_metrics(trained)}
        else:
            with log.span("score"):
                compare = partial(compare_untrained, trainer, groups.sampled, num_scored=num_scored)
                compared = await asyncio.to_thread(compare)
            trained = {"train/num_rows": 0, "train/policy_version": trainer.policy_version, **compared}
        self.num_empty = 0 if is_trained else self.num_empty + 1
        log.end_update({**made.metrics, **trained})

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
                await asyncio.to_thread(self.checkpoints.save, self.trainer, self.last)
        self.log.end_checkpoint(time.perf_counter() - started)

    async def _publish(self, *, is_part_of_step: bool = True) -> None:
        """Publish the weights as they are, while nothing is sampled.

        Raises:
            OutageError: the engine was gone, and has stayed away for `OutageConfig.wait_s`.
        """
        version = self.trainer.policy_version
        with self.timeline.span(f"publish version {version}", track=Track.PUBLISHER), record_function("publish"):
            update = await self.outages.publish()
        self._note_published(version)
        lost_s = self.outages.take_metrics()["seconds/outages"]
        if is_part_of_step:
            self.log.end_publication(update, lost_s=lost_s)

    async def _begin_publication(self) -> None:
        """Copy the weights, and publish the copy beside the next step; the publication before it has ended by then."""
        await self._end_publication()
        version = self.trainer.policy_version
        if self.queue.engine_version == version:  # the wait ended an outage, after which these were published
            return
        with self.timeline.span("snapshot"):
            weights = await copy_weights(self.trainer, self.publisher)
        self.publication = asyncio.create_task(self._publish_beside(weights, version))

    async def _publish_beside(self, weights: WeightStream | None, version: int) -> int | None:
        """Publish the copy; in a process without a publisher, wait for the one that publishes for it.

        Returns the version if nothing was raised. No error leaves this, for it is awaited only where the processes
        meet: the queue keeps it until then, and starts no group.
        """
        try:
            with self.timeline.span(f"publish version {version}", track=Track.PUBLISHER):
                if self.publisher is None or weights is None:
                    is_taken = await self.notices.wait_for(version)
                else:
                    waiting = log_waiting(f"policy version {version} to be taken by the engine")
                    async with self.notices.announce(version), waiting:
                        update = await self.publisher.publish(weights, policy_version=version)
                    is_taken = True
                    self.log.end_publication_beside(update)
        except EngineError as error:
            self.queue.lose(error)
            return None
        except Exception as error:
            self.queue.fail(error)
            return None
        if is_taken:  # if not, the process that publishes has the error, and raises it when they meet
            self.outages.require_newest(version)
            self._note_published(version)
        return version

    async def _end_publication(self) -> None:
        """Wait for the publication beside the steps, in all processes; if it lost the engine, until that is back."""
        if self.publication is None:
            return
        version = await self.publication
        self.publication = None
        if await self._meet():
            await self._recover()
        elif version is not None:
            self.queue.set_engine_version(version)

    async def _recover(self) -> None:
        """Wait in all processes until the engines are back, and give them the trainer's weights before a group starts.

        An engine that comes back has the weights that it was started with, and may have missed a publication besides.
        Groups in flight on engines that are there are not cut off.
        """
        with self.timeline.span("outage"):
            if self.publication is not None:
                await self.publication  # if it failed, that is why this was called, or the next meeting raises it
                self.publication = None
            await self.outages.recover(self.queue.lost)
            self.queue.end_outage(self.trainer.policy_version)

    async def _meet(self) -> bool:
        """Meet the other processes: a failure of one is raised in all. Returns whether any has lost its engine."""
        is_lost = self.queue.lost is not None
        await raise_together(self.trainer, self.queue.failure)
        return await in_any_process(self.trainer, is_lost)

    async def _end(self, step: int, logged: Metrics) -> None:
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

    async def begin(self, *, has_engine_version: bool) -> None:
        """Begin the run. One that continues first does again what a kill may have cut off after its last step.

        `has_engine_version` says that the trainer has the version that it was made with, and so the weights with which
        the engine was opened: then there is nothing to publish.
        """
        if self.last is not None:
            if not has_engine_version:
                await self._publish(is_part_of_step=not self._samples_nothing(self.num_made))
            await self.outages.repeat(self.observer.on_resume)
            await self._end(self.num_made - 1, self.log.end_step_of_another())
        self.log.restart()

    async def finish(self) -> None:
        """Wait until the last weights are published and the last checkpoint is written."""
        await self._end_publication()
        if self.checkpoints is not None:
            await asyncio.to_thread(self.checkpoints.finish, self.trainer)

    async def close(self) -> None:
        """Cancel what runs beside the steps, and wait for a checkpoint that is being written."""
        try:
            if self.publication is not None:
                self.publication.cancel()
                await asyncio.gather(self.publication, return_exceptions=True)
            await self.queue.close()
        finally:
            if self.checkpoints is not None:
                await asyncio.to_thread(self.checkpoints.close)

    def save_last(self, checkpoints: Checkpoints) -> None:
        """Write a checkpoint of the last step that was made, unless there is one: the run ends. Blocks."""
        checkpoints.finish(self.trainer)
        if self.last is not None and not checkpoints.holds(self.last.num_steps):
            checkpoints.save(self.trainer, self.last)
            checkpoints.finish(self.trainer)

    async def _begin_log(self, groups: StepGroups) -> float:
        """Begin the metrics with those of the wait for the groups; returns the seconds in which they were sampled.

        With `max_staleness` these also say, since the step before, what became of the groups of all processes and for
        which share of the time trainer and sampler were idle.
        """
        sampler: Metrics = {}
        lost = self.outages.take_metrics()
        if self.config.max_staleness > 0:
            counts = reduce(add, await from_all_processes(self.trainer, groups.counts))
            named = {f"sampler/{name}": count for name, count in asdict(counts).items()}
            sampler = {**named, **self.queue.idle.take_metrics()}
        return self.log.begin(groups.waited_s, since_last_s=groups.since_last_s, lost=lost, sampler=sampler)

    def _note_published(self, version: int) -> None:
        """The engine has this version: groups that waited for it may start."""
        self.queue.set_engine_version(version)
        self.timeline.count("version, published", version=version)

    async def _report_empty(self, step: int, logged: Metrics) -> None:
        """Warn of a step that trained no row; end the run if too many did in a row."""
        reasons = explain_empty(logged)
        if self.trainer.is_main_process:
            self.observer.warn(f"step {step} trained nothing: {reasons}")
        if self.num_empty != self.config.max_empty_steps:
            return
        model = ""
        if self.checkpoints is not None:
            await asyncio.to_thread(self.save_last, self.checkpoints)
            newest = find_checkpoints(self.checkpoints.folder)[step + 1]
            model = f"`unbroken export {newest} MODEL` writes the model of the last step. "
        raise RolloutError(
            f"{self.num_empty} steps in a row trained nothing; of the last one, {reasons}. {model}"
            "Take problems that the policy solves sometimes, more rollouts of each (rollouts.group_size), or limits "
            "that let them end (rollouts.limits). "
            f"LoopConfig.max_empty_steps ({self.config.max_empty_steps}) is how many such steps a run may make; with "
            "none it continues (--loop.max-empty-steps none)"
        )
