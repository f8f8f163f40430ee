"""The parts of a step that all loops share: units, updates, a checkpoint, weights to the engine, metrics.

groups ── train ──► metrics ── save ── publish ── end
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch.profiler import record_function

from unbroken.counters import Counters, Event
from unbroken.engines.base import Engine
from unbroken.errors import CheckpointError, EngineError, InvalidInputError, OutageError, RolloutError
from unbroken.rollout.failures import format_error, format_frames
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.timeline import Timeline
from unbroken.training.agreement import fail_together, from_all_processes, in_any_process
from unbroken.training.checkpoints import Checkpoints, LastStep, find_checkpoints
from unbroken.training.checks import check_engine
from unbroken.training.config import LoopConfig
from unbroken.training.metrics.rollouts import RolloutNumbers, rollout_metrics
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.metrics.writer import Metrics, MetricsWriter
from unbroken.training.objective.samples import DropReason
from unbroken.training.outages import Outages
from unbroken.training.snapshots import Snapshots
from unbroken.training.trainer import Trainer
from unbroken.training.waiting import log_waiting
from unbroken.training.zero_variance import compare_zero_variance
from unbroken.weights.base import WeightPublisher, WeightUpdate

_logger = logging.getLogger(__name__)
BeforeStep: TypeAlias = Callable[[], Awaitable[None]]
"""Called when a step's groups are sampled and there is something to train on; `SleepingEngine.sleep` is one."""
AfterStep: TypeAlias = Callable[[int], Awaitable[None]]
"""Called in all processes once a step is over, its weights published and its numbers written, with the number of steps
made; on resume, again for the last one. It may wait for the other processes, and must fail in all of them or in none.
After an `OutageError` it is called again, once the engine is back.
"""
OnRollouts: TypeAlias = Callable[["StepRollouts"], Awaitable[None]]
"""Called in all processes with a step's rollouts before they are trained on. As `AfterStep`, it fails in all or none.
"""
OnStep: TypeAlias = Callable[[int, Metrics], None]
"""Called after each step with its number, from 0, and its metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """What a process collected for one step, and what it trains on."""

    step: int
    """From 0."""
    groups: Sequence[TrajectoryGroup]
    units: Sequence[Any]
    """The objective's; `trainer.objective.get_rows` has their rows."""
    counters: Counters
    """Of this process's rollouts and dropped rows."""
    is_trained: bool
    """Whether a process has anything to train on. If so, the trainer may use the engine's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The groups of this process for one step."""

    step: int
    groups: Sequence[TrajectoryGroup]
    replaced: Sequence[TrajectoryGroup] = ()
    """Groups whose rewards are all equal, instead of which others were sampled."""
    counters: Counters
    """Of all of them; rows that are dropped are counted here too."""
    started: float
    """`time.perf_counter` when the step began to wait for them; with `max_staleness`, when the one before was made."""
    seconds: float
    """How long it waited, without outages."""
    sampling_s: float
    """How long they, or as many others, took to sample."""
    metrics: Metrics
    """More of them, over all processes."""

    @property
    def sampled(self) -> Sequence[TrajectoryGroup]:
        """All groups, the replaced ones last."""
        return [*self.groups, *self.replaced]

    @staticmethod
    def count(groups: Sequence[TrajectoryGroup]) -> Counters:
        """The counters of all groups together."""
        counters = Counters()
        for group in groups:
            counters.merge(group.counters)
        return counters


@dataclass(slots=True, kw_only=True)
class Steps:
    """The steps of one call of `train`."""

    trainer: Trainer
    publisher: WeightPublisher | None
    outages: Outages
    config: LoopConfig
    checkpoints: Checkpoints | None
    metrics: MetricsWriter | None
    on_step: OnStep | None
    before_step: BeforeStep | None
    after_step: AfterStep | None
    on_rollouts: OnRollouts | None
    timeline: Timeline
    snapshots: Snapshots
    has_numbers: bool = False
    """Whether groups are sampled one by one, by their numbers (`LastStep.groups`)."""
    last: LastStep | None = None
    num_empty: int = 0
    """Steps in a row that trained no row, since the run was started."""

    @property
    def num_steps(self) -> int:
        """The number of steps made."""
        return 0 if self.last is None else self.last.num_steps

    async def resume(self, engine: Engine | None, others: Sequence[Engine] = ()) -> None:
        """Go on after the newest checkpoint, if there is one, with a version that no engine has other weights of."""
        version = self.trainer.policy_version
        if self.checkpoints is not None:
            self.last = await asyncio.to_thread(self.checkpoints.resume, self.trainer)
            if self.num_steps > self.config.num_steps:
                raise InvalidInputError(
                    f"LoopConfig.num_steps must be at least {self.num_steps}, the steps that the run in "
                    f"{self.checkpoints.folder} has made, got {self.config.num_steps}"
                )
            if self.last is not None and self.last.groups is not None and not self.has_numbers:
                raise CheckpointError(
                    f"the run in {self.checkpoints.folder} began with LoopConfig.max_staleness or max_replacements "
                    "above 0, or a curriculum, and cannot continue without, because its groups were not trained in "
                    "their order: give it the same"
                )
        if self.last is not None:
            engines = [each for each in (engine, *others) if each is not None]
            newest = max((each.policy_version for each in engines), default=0)
            if (newest := max(await from_all_processes(self.trainer, newest))) > self.trainer.policy_version:
                self.trainer.policy_version = newest + 1
        async with fail_together(self.trainer):
            if self.checkpoints is not None and self.metrics is not None:
                self.metrics.cut(max(self.num_steps - 1, 0))
            if engine is not None:
                check_engine(engine, vocab_size=self.trainer.vocab_size, policy_version=self.trainer.policy_version)
        if self.last is not None:
            has_new_weights = self.trainer.policy_version != version
            logged = await self._publish_and_measure(self.last.metrics) if has_new_weights else self.last.metrics
            await self.end(self.num_steps - 1, logged)

    async def train(self, collected: Collected) -> Metrics:
        """Train on the groups, unless no process has anything to train on, and return the step's metrics."""
        trainer = self.trainer
        async with fail_together(trainer):
            units = await trainer.make_units(collected.groups, collected.counters)
            replaced: Sequence[Any] = ()
            if self.config.replaces_groups:  # they are not trained on, and are counted by reason
                replaced = await trainer.make_units(collected.replaced, collected.counters)
        get_rows, get_idle = trainer.objective.get_rows, trainer.objective.get_idle_rows
        num_trained = sum(bool(get_rows(unit)) for unit in units)
        untrained = [rows for unit in units if (rows := get_idle(unit))]
        untrained += [rows for unit in replaced if (rows := get_idle(unit) or get_rows(unit))]
        num_replaced = sum(bool(get_rows(unit)) for unit in replaced)
        collected.counters.count(Event.DROPPED_ROW, DropReason.NO_VARIANCE, times=num_replaced)
        numbers = RolloutNumbers.of(collected.groups, collected.counters, replaced=collected.replaced)
        everyone = RolloutNumbers.merge(await from_all_processes(trainer, numbers))
        trained: Metrics = {"train/num_rows": 0, "train/policy_version": trainer.policy_version}
        with record_function("train"):
            if is_trained := await in_any_process(trainer, num_trained > 0):
                async with fail_together(trainer):
                    if self.before_step is not None:
                        await self.before_step()
            if self.on_rollouts is not None:
                await self.on_rollouts(
                    StepRollouts(
                        step=collected.step,
                        groups=collected.sampled,
                        units=units,
                        counters=collected.counters,
                        is_trained=is_trained,
                    )
                )
            if is_trained:
                num_scored = self.config.num_zero_variance_scored
                zero_variance = await asyncio.to_thread(
                    compare_zero_variance, trainer, untrained, num_scored=num_scored
                )
                with self.timeline.span("train", units=num_trained):
                    trained = step_metrics(await asyncio.to_thread(trainer.step, units))
                trained = {**trained, **zero_variance.get_metrics(trained)}
        self.num_empty = 0 if is_trained else self.num_empty + 1
        return {
            **rollout_metrics(everyone, collect_s=collected.sampling_s),
            **trainer.objective.get_metrics(units),
            **trained,
            **collected.metrics,
            "seconds/collect": collected.seconds,
            "seconds/step": time.perf_counter() - collected.started,
        }

    async def save(self, step: int, trained: Metrics, *, groups: Mapping[str, Any] | None = None) -> Metrics:
        """Begin to write a checkpoint if one is due, and return the step's metrics with the time that this took.

        `groups` are those trained so far (`LastStep.groups`).
        """
        self.last = LastStep(num_steps=step + 1, metrics={**trained, "seconds/checkpoint": None}, groups=groups)
        if self.checkpoints is None:
            return trained
        started, num_steps = time.perf_counter(), self.config.num_steps
        if await asyncio.to_thread(self.checkpoints.agree_if_due, self.trainer, step + 1, last=num_steps):
            with self.timeline.span("checkpoint"):
                await asyncio.to_thread(self.checkpoints.save, self.trainer, self.last)
        seconds = time.perf_counter() - started
        step_s = (trained["seconds/step"] or 0) + seconds
        return {**trained, "seconds/checkpoint": seconds, "seconds/step": step_s}

    async def publish(self, trained: Metrics) -> Metrics:
        """Publish the weights if the step changed them, and return its metrics with those of publishing."""
        return await self._publish_and_measure(trained) if trained["train/num_rows"] else trained

    async def end(self, step: int, logged: Metrics) -> None:
        """Write the step's numbers, and do what comes after a step."""
        logged = {**_serial_idle_metrics(logged), **logged}
        async with fail_together(self.trainer):
            if self.metrics is not None:
                with self.timeline.span("log"):
                    await asyncio.to_thread(self.metrics.write, step, logged)
            if self.on_step is not None:
                self.on_step(step, logged)
        if self.after_step is not None:
            with self.timeline.span("after the step"):
                await self.outages.repeat(partial(self.after_step, step + 1))
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

    async def _publish_and_measure(self, trained: Metrics) -> Metrics:
        update = await self.outages.publish()
        lost_s = self.outages.take_metrics()["seconds/outages"]
        if not trained["train/num_rows"]:
            return trained
        return {
            **trained,
            **update_metrics(update),
            "seconds/outages": (trained["seconds/outages"] or 0) + lost_s,
            "seconds/step": (trained["seconds/step"] or 0) + update.seconds + lost_s,
        }


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


async def publish_together(trainer: Trainer, publisher: WeightPublisher | None) -> WeightUpdate:
    """Publish; an error of one process is raised on all, but a lost engine in its own only, for `Outages` to settle."""
    started = time.perf_counter()
    weights = trainer.named_weights()
    update, gone, failure = None, None, None
    try:
        if publisher is not None:
            async with log_waiting(f"policy version {trainer.policy_version} to be taken by the engine"):
                update = await publisher.publish(weights, policy_version=trainer.policy_version)
    except EngineError as error:
        gone = error
    except Exception as error:
        failure = error
    await asyncio.to_thread(trainer.finish_together, weights, failure)
    if gone is not None:
        raise gone
    return update or WeightUpdate(num_bytes=0, seconds=time.perf_counter() - started)


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
