"""The steps of a run, as the loop makes them: units, updates, a checkpoint, weights to the engine, metrics.

groups ── make_step: train, save ── publish_now, or publish beside the next step ── end_step
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial, reduce
from operator import add
from typing import Any

import numpy as np
from torch.profiler import record_function

from unbroken.counters import Counters, Event
from unbroken.engines.base import Engine
from unbroken.errors import EngineError, InvalidInputError, OutageError, RolloutError
from unbroken.ledger.export import export_samples
from unbroken.rollout.failures import format_error, format_frames
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.timeline import Timeline
from unbroken.training.checkpoints import Checkpoints, LastStep, find_checkpoints
from unbroken.training.checks import check_engine
from unbroken.training.config import LoopConfig
from unbroken.training.groups import TakenGroups
from unbroken.training.metrics.mismatch import Mismatch, mismatch
from unbroken.training.metrics.rollouts import RolloutNumbers, rollout_metrics
from unbroken.training.metrics.stats import mismatch_metrics, step_metrics
from unbroken.training.metrics.writer import Metrics, MetricsWriter
from unbroken.training.objective.samples import DropReason
from unbroken.training.observer import IdleTimes, LoopEvent, RunObserver, StepRollouts, StepTimes, write_event
from unbroken.training.outages import Outages
from unbroken.training.publication import Notices, Snapshot, Snapshots
from unbroken.training.trainer import Trainer
from unbroken.training.waits import fail_together, from_all_processes, in_any_process, log_waiting, raise_together
from unbroken.types import Logprobs, TrainingSample
from unbroken.weights.base import WeightPublisher, WeightUpdate

_logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Steps:
    """The `StepMaker` of one call of `train`."""

    trainer: Trainer
    publisher: WeightPublisher | None
    outages: Outages
    config: LoopConfig
    checkpoints: Checkpoints | None
    metrics: MetricsWriter | None
    observer: RunObserver
    timeline: Timeline
    snapshots: Snapshots
    notices: Notices
    last: LastStep | None = None
    num_empty: int = 0
    """Steps in a row that trained no row, since the run was started."""
    idle: IdleTimes = field(default_factory=IdleTimes)
    times: StepTimes = field(default_factory=StepTimes)
    _last_made_s: float = field(default_factory=time.perf_counter)
    """When the step before was made, or the loop began."""
    _trained: Metrics = field(default_factory=dict)
    """Of the step that was made last."""
    _published: Metrics = field(default_factory=dict)
    """Of the last publication beside a step that has ended."""
    _lost_after_step: Mapping[str, float] = field(default_factory=dict)
    """Outages in what came after the step before: they are metrics of the next step, as the time after a step is."""

    @property
    def num_steps(self) -> int:
        """The number of steps made."""
        return 0 if self.last is None else self.last.num_steps

    @property
    def policy_version(self) -> int:
        """The version of the trainer's weights."""
        return self.trainer.policy_version

    def observe(self, event: LoopEvent) -> None:
        """See what happens in the loop."""
        self.idle.observe(event)
        write_event(self.timeline, event)
        self.observer.on_event(event)

    async def resume(self, engine: Engine | None) -> None:
        """Go on after the newest checkpoint, if there is one, with a version that no engine has other weights of."""
        version = self.trainer.policy_version
        if self.checkpoints is not None:
            self.last = await asyncio.to_thread(self.checkpoints.resume, self.trainer)
            if self.num_steps > self.config.num_steps:
                raise InvalidInputError(
                    f"LoopConfig.num_steps must be at least {self.num_steps}, the steps that the run in "
                    f"{self.checkpoints.folder} has made, got {self.config.num_steps}"
                )
        if self.last is not None:
            newest = max(0 if engine is None else engine.policy_version, self.observer.get_newest_version())
            if (newest := max(await from_all_processes(self.trainer, newest))) > self.trainer.policy_version:
                self.trainer.policy_version = newest + 1
        async with fail_together(self.trainer):
            if self.checkpoints is not None and self.metrics is not None:
                self.metrics.cut(max(self.num_steps - 1, 0))
            if engine is not None:
                check_engine(engine, vocab_size=self.trainer.vocab_size, policy_version=self.trainer.policy_version)
        if self.last is not None:
            self._trained = self.last.metrics
            if self.trainer.policy_version != version:
                await self.publish_now()
            await self.outages.repeat(self.observer.on_resume)
            await self._end_step(self.num_steps - 1, StepTimes.unknown())
        self._last_made_s = time.perf_counter()
        self.times = StepTimes()

    def around_step(self, step: int) -> AbstractContextManager[None]:
        """A block in which the step is made."""
        return self.observer.around_step(step)

    async def agree(self, *, is_lost: bool, failure: Exception | None) -> bool:
        """Return whether any process has lost its engine; a failure of one is raised in all."""
        await raise_together(self.trainer, failure)
        return await in_any_process(self.trainer, is_lost)

    async def recover(self, lost: EngineError | None) -> None:
        """Wait until the engines are back, and publish the trainer's weights to them (`Outages.recover`)."""
        await self.outages.recover(lost)

    async def find_loss(self, groups: Sequence[TrajectoryGroup], *, oldest_version: int) -> EngineError | None:
        """The error if the engine went away, or has ids older than `oldest_version`; None if the groups can be used."""
        return await self.outages.find_loss(groups, oldest_version=oldest_version)

    async def is_outage(self, error: EngineError) -> bool:
        """Whether an error says that the engine went away; otherwise it refused a request."""
        return await self.outages.is_outage(error)

    async def make_step(self, taken: TakenGroups) -> None:
        """Train on the groups, and write a checkpoint if one is due."""
        await check_some_succeeded(taken.sampled, taken.step, self.trainer)
        trained = await self._train(taken)
        self._trained = await self._save(taken, trained)
        self._last_made_s = time.perf_counter()

    async def publish_now(self) -> None:
        """Publish the trainer's weights, in all processes together; wait if the engines are gone."""
        with record_function("publish"):
            update = await self.outages.publish()
        lost_s = self.outages.take_metrics()["seconds/outages"]
        if not self._trained["train/num_rows"]:
            return
        self._trained = {
            **self._trained,
            **update_metrics(update),
            "seconds/outages": (self._trained["seconds/outages"] or 0) + lost_s,
            "seconds/step": (self._trained["seconds/step"] or 0) + update.seconds + lost_s,
        }

    async def snapshot(self) -> Snapshot | None:
        """A copy of the trainer's weights, for `publish`; None in a process that publishes none."""
        with self.timeline.span("snapshot"):
            return await self.snapshots.take()

    async def publish(self, snapshot: Snapshot | None, *, policy_version: int) -> bool:
        """Publish a snapshot beside the next step, and return whether this process's engine has it now."""
        is_taken = await self._publish(snapshot, policy_version)
        if is_taken:
            self.outages.require_newest(policy_version)
        return is_taken

    def needs_engine(self, step: int) -> bool:
        """Whether what comes after this step samples."""
        return self.observer.needs_engine(step + 1)

    async def end_step(self, step: int) -> None:
        """Write the step's numbers, and do what comes after a step."""
        times = self.times.end_step({**self._trained, **self._published})
        if self.config.max_staleness > 0:  # a publication beside the step is counted in the step that it ends in
            times = {**times, "seconds/other": None}
        await self._end_step(step, times)

    async def _end_step(self, step: int, times: Metrics) -> None:
        logged: Metrics = {**self._trained, **self._published, **times}
        logged = {**_serial_idle_metrics(logged), **logged}
        self._published = {}
        with self.times.span("log"):
            async with fail_together(self.trainer):
                if self.metrics is not None:
                    with self.timeline.span("log"):
                        await asyncio.to_thread(self.metrics.write, step, logged)
                self.observer.on_step(step, logged)
        with record_function("after step"), self.timeline.span("after the step"), self.times.span("after_step"):
            await self.outages.repeat(partial(self.observer.after_step, step + 1))
        self._lost_after_step = self.outages.take_metrics()
        self.times.add("after_step", -self._lost_after_step["seconds/outages"])
        self.snapshots.release()
        if self.num_empty > 0:
            await self._report_empty(step, logged)

    async def save_after_outage(self, error: OutageError) -> OutageError:
        """Write a checkpoint of the last step, unless there is one, and add to the error where the run stands."""
        if self.checkpoints is None:
            return OutageError(f"{error}. The run had no `checkpoints` and begins anew when it is started again")
        await asyncio.to_thread(self._save_last, self.checkpoints)
        return OutageError(
            f"{error}. The run stands after {self.num_steps} steps in {self.checkpoints.folder}: start it again once "
            "the engine is there, and it goes on from there"
        )

    async def _train(self, taken: TakenGroups) -> Metrics:
        """Train on the groups, unless no process has anything to train on, and return the step's metrics."""
        trainer, counters = self.trainer, Counters()
        began_s, sampling_s, waited = await self._measure_wait(taken)
        for group in taken.sampled:
            counters.merge(group.counters)
        with self.times.span("units"):
            async with fail_together(trainer):
                units = await trainer.make_units(taken.groups, counters)
                replaced: Sequence[Any] = ()
                if self.config.replaces_groups:  # they are not trained on, and are counted by reason
                    replaced = await trainer.make_units(taken.replaced, counters)
        get_rows, get_idle = trainer.objective.get_rows, trainer.objective.get_idle_rows
        num_replaced = sum(bool(get_rows(unit)) for unit in replaced)
        counters.count(Event.DROPPED_ROW, DropReason.NO_VARIANCE, times=num_replaced)
        with self.times.span("metrics"):
            numbers = RolloutNumbers.of(taken.groups, counters, replaced=taken.replaced)
            everyone = RolloutNumbers.merge(await from_all_processes(trainer, numbers))
        trained: Metrics = {"train/num_rows": 0, "train/policy_version": trainer.policy_version}
        with record_function("train"):
            is_trained = await in_any_process(trainer, any(get_rows(unit) for unit in units))
            if is_trained:
                with self.times.span("sleep"):
                    async with fail_together(trainer):
                        if self.observer.before_update is not None:
                            await self.observer.before_update()
            rollouts = StepRollouts(
                step=taken.step, groups=taken.sampled, units=units, counters=counters, is_trained=is_trained
            )
            with self.times.span("records"):
                await self.observer.on_rollouts(rollouts)
            if is_trained:
                untrained = [rows for unit in units if (rows := get_idle(unit))]
                untrained += [rows for unit in replaced if (rows := get_idle(unit) or get_rows(unit))]
                trained = await self._update(units, untrained)
            else:
                trained = {**trained, **await self._compare_untrained(taken.sampled)}
        self.num_empty = 0 if is_trained else self.num_empty + 1
        with self.times.span("metrics"):
            found = {**rollout_metrics(everyone, collect_s=sampling_s), **trainer.objective.get_metrics(units)}
        return {**found, **trained, **waited, "seconds/step": time.perf_counter() - began_s}

    async def _update(self, units: Sequence[Any], untrained: Sequence[Any]) -> Metrics:
        num_scored = self.config.num_zero_variance_scored
        num_trained = sum(bool(self.trainer.objective.get_rows(unit)) for unit in units)
        with self.times.span("score"):
            zero_variance = await asyncio.to_thread(
                compare_zero_variance, self.trainer, untrained, num_scored=num_scored
            )
        with self.timeline.span("train", units=num_trained):
            trained = step_metrics(await asyncio.to_thread(self.trainer.step, units))
        return {**trained, **zero_variance.get_metrics(trained)}

    async def _compare_untrained(self, groups: Sequence[TrajectoryGroup]) -> Metrics:
        """The mismatch of a step that trains nothing: its rollouts show as well whether both have one policy (I9).

        A sampler that speaks garbage earns no rewards, so no step would be trained, and none compared.
        """
        rows = [
            sampled
            for group in groups
            for trajectory in group.trajectories
            if (sampled := export_samples(trajectory.tree, 0.0))
        ]
        rows = [of_one for of_one in rows if of_one[0].temperature == rows[0][0].temperature]  # as a pass has one
        num_scored = max(self.config.num_zero_variance_scored, 1)
        with self.times.span("score"):
            found = await asyncio.to_thread(compare_zero_variance, self.trainer, rows, num_scored=num_scored)
        if found.scored is None:
            return {}
        return {**mismatch_metrics(found.scored), "mismatch/kl": found.scored.k3}

    async def _measure_wait(self, taken: TakenGroups) -> tuple[float, float, Metrics]:
        """When the step began, how long its groups took to sample, and the metrics of the wait for them.

        Without `max_staleness` it begins when it waits for them, and they take what it waits, without outages. With it,
        it begins once the step before is made, and its groups, or as many others, take the time between two steps.
        """
        lost = self.outages.take_metrics()
        waited_s = taken.waited_s - lost["seconds/outages"]
        lost = {name: number + self._lost_after_step.get(name, 0) for name, number in lost.items()}
        if self.config.max_staleness == 0:
            return time.perf_counter() - taken.waited_s, waited_s, {**lost, "seconds/collect": waited_s}
        counts = reduce(add, await from_all_processes(self.trainer, taken.counts))
        waited: Metrics = {
            **lost,
            **{f"sampler/{name}": value for name, value in asdict(counts).items()},
            **self.idle.take_metrics(asyncio.get_running_loop().time()),
            "seconds/collect": taken.waited_s,
        }
        return self._last_made_s, taken.since_last_s, waited

    async def _save(self, taken: TakenGroups, trained: Metrics) -> Metrics:
        """Begin to write a checkpoint if one is due, and return the step's metrics with the time that this took."""
        num_steps = taken.step + 1
        self.last = LastStep(num_steps=num_steps, metrics={**trained, "seconds/checkpoint": None}, groups=taken.numbers)
        if self.checkpoints is None:
            return trained
        started = time.perf_counter()
        if await asyncio.to_thread(self.checkpoints.agree_if_due, self.trainer, num_steps, last=self.config.num_steps):
            with self.timeline.span("checkpoint"):
                await asyncio.to_thread(self.checkpoints.save, self.trainer, self.last)
        seconds = time.perf_counter() - started
        step_s = (trained["seconds/step"] or 0) + seconds
        return {**trained, "seconds/checkpoint": seconds, "seconds/step": step_s}

    async def _publish(self, snapshot: Snapshot | None, policy_version: int) -> bool:
        if self.publisher is None or snapshot is None:
            return await self.notices.wait_for(policy_version)
        waiting = log_waiting(f"policy version {policy_version} to be taken by the engine")
        async with self.notices.announce(policy_version), waiting:
            update = await self.publisher.publish(snapshot, policy_version=policy_version)
        self._published = update_metrics(update)
        return True

    def _save_last(self, checkpoints: Checkpoints) -> None:
        checkpoints.finish(self.trainer)
        if self.last is not None and not checkpoints.holds(self.num_steps):
            checkpoints.save(self.trainer, self.last)
            checkpoints.finish(self.trainer)

    async def _report_empty(self, step: int, logged: Metrics) -> None:
        """Warn of a step that trained no row; end the run if too many did in a row."""
        reasons = explain_empty(logged)
        if self.trainer.is_main_process:
            _logger.warning("step %d trained nothing: %s", step, reasons)
        if self.num_empty != self.config.max_empty_steps:
            return
        model = ""
        if self.checkpoints is not None:
            await asyncio.to_thread(self._save_last, self.checkpoints)
            newest = find_checkpoints(self.checkpoints.folder)[self.num_steps]
            model = f" (`unbroken export {newest} MODEL` writes its model)"
        raise RolloutError(
            f"{self.num_empty} steps in a row trained nothing; of the last one, {reasons}. If that is all the reward "
            f"there is, the task is solved and the run is done{model}. If not: take problems that the policy solves "
            "sometimes, more rollouts of each (rollouts.group_size), or limits that let them end (rollouts.limits). "
            f"LoopConfig.max_empty_steps ({self.config.max_empty_steps}) is how many such steps a run may make; with "
            "none it goes on (--loop.max-empty-steps none)"
        )


_REASONS = {
    "counters/status/timeout": "timed out",
    "counters/dropped_rows/failed": "failed",
    "counters/dropped_rows/aborted": "were aborted by the engine",
    "counters/dropped_rows/unscored": "have no score",
    "counters/dropped_rows/small_group": "have no sibling to compare with",
    "counters/dropped_rows/masked": "are masked, because a length limit cut them",
    "counters/dropped_rows/nothing_sampled": "sampled nothing",
}


def explain_empty(logged: Metrics) -> str:
    """Why a step trained nothing, in counts over all processes."""
    found = []
    if equal := logged["groups/num_zero_variance"]:
        compared, mean = logged["groups/num_compared"], logged["reward/mean"]
        found.append(f"{equal} of {compared} groups have equal rewards (the mean is {mean:.3g})")
    rollouts = logged["rollout/num_trajectories"]
    found += [f"{logged[name]} of {rollouts} rollouts {words}" for name, words in _REASONS.items() if logged.get(name)]
    if too_old := (logged.get("sampler/num_dropped") or 0) + (logged.get("sampler/num_cancelled") or 0):
        found.append(f"{too_old} groups were too old (max_staleness)")
    return "; ".join(found) or "there were no rollouts to train on"


def update_metrics(update: WeightUpdate) -> Metrics:
    """The metrics of an update of the engines' weights."""
    return {
        "weights/num_bytes": update.num_bytes,
        "weights/num_missed": len(update.missed_by),
        "seconds/publish": update.seconds,
    }


def _serial_idle_metrics(logged: Metrics) -> Metrics:
    """The idle shares of a step that collects first, and samples nothing after that."""
    collect_s, step_s = (logged.get(name) for name in ("seconds/collect", "seconds/step"))
    if collect_s is None or not step_s:
        return {"idle/trainer": None, "idle/sampler": None}
    return {"idle/trainer": collect_s / step_s, "idle/sampler": 1 - collect_s / step_s}


async def check_some_succeeded(groups: Sequence[TrajectoryGroup], step: int, trainer: Trainer) -> None:
    """Warn of failed rollouts; raise if those of all processes failed, or such a run would silently train nothing."""
    errors = [trajectory.error for group in groups for trajectory in group.trajectories]
    failed = [error for error in errors if error is not None]
    first_here = format_error(failed[0]) + format_frames(failed[0]) if failed else None
    everyone = await from_all_processes(trainer, (len(errors), len(failed), first_here))
    num_rollouts, num_failed = (sum(counts) for counts in list(zip(*everyone, strict=True))[:2])
    if num_failed == 0:
        return
    first = next(words for _, _, words in everyone if words is not None)
    if num_failed == num_rollouts:
        cause = failed[0] if failed else None
        raise RolloutError(f"all {num_failed} rollouts of step {step} failed, the first with {first}") from cause
    if trainer.is_main_process:
        _logger.warning("%d of %d rollouts of step %d failed, the first with %s", num_failed, num_rollouts, step, first)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroVariance:
    """The mismatch of rows that are sampled but not trained on, because every advantage of their group is zero.

    The trained rows are only a part of the sampled ones, and none once a task is solved. So some rows of the other
    groups are scored before the update, and count in `mismatch/kl` by the number of ids, over all processes:

        trained          300 ids, k3 2e-7
        zero variance    100 ids, of which 40 were scored: k3 6e-7
        mismatch/kl      (300 * 2e-7 + 100 * 6e-7) / 400 = 3e-7
    """

    num_tokens: int
    """Their loss tokens."""
    scored: Mismatch | None
    """Trainer against sampler on the rows that were scored; None if there were none."""

    def get_metrics(self, trained: Metrics) -> Metrics:
        """The metrics to log beside those of the rows that were trained on."""
        num_trained, k3 = trained["train/num_loss_tokens"] or 0, trained["mismatch/k3"] or 0.0
        all_k3: float | None = k3
        if self.num_tokens > 0:
            all_k3 = None
            if self.scored is not None:
                all_k3 = (num_trained * k3 + self.num_tokens * self.scored.k3) / (num_trained + self.num_tokens)
        return {
            "mismatch/kl": all_k3,
            "mismatch/num_zero_variance_tokens": self.num_tokens,
            "mismatch/zero_variance_k3": None if self.scored is None else self.scored.k3,
            "mismatch/zero_variance_max_abs": None if self.scored is None else self.scored.max_abs,
        }


def compare_zero_variance(
    trainer: Trainer, rows: Sequence[Sequence[TrainingSample]], *, num_scored: int
) -> ZeroVariance:
    """Score the rows of up to `num_scored` trajectories by `Trainer.logprobs`, and check that they are of one policy.

    Blocks; every process calls it. Raises as `Trainer.check_policy` does.
    """
    evenly_spread = rows[:: max(1, math.ceil(len(rows) / num_scored))] if num_scored > 0 else []
    chosen = [row for of_member in evenly_spread for row in of_member]
    logprobs: Sequence[Logprobs] = []
    if trainer.in_any_process(bool(chosen)):
        logprobs = trainer.logprobs(chosen)
        trainer.check_policy(chosen, logprobs)
    pairs = [
        (of_row[row.loss_mask], row.rollout_logprobs[row.loss_mask])
        for row, of_row in zip(chosen, logprobs, strict=True)
    ]
    num_tokens = sum(int(row.loss_mask.sum()) for of_member in rows for row in of_member)
    everyone = trainer.from_all_processes((num_tokens, pairs))
    seen = [pair for _, of_process in everyone for pair in of_process]
    scored = mismatch(*(np.concatenate(side) for side in zip(*seen, strict=True))) if seen else None
    return ZeroVariance(num_tokens=sum(of_process for of_process, _ in everyone), scored=scored)
