"""The training loop: collect, make units, step, save, publish, log. It knows neither messages nor renderers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch.profiler import record_function

from unbroken.counters import Counters
from unbroken.engines.base import Engine
from unbroken.errors import EngineError, InvalidInputError, OutageError, RolloutError
from unbroken.rollout.failures import format_error
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.checkpoints import Checkpoints, LastStep
from unbroken.training.checks import check_engine
from unbroken.training.config import LoopConfig
from unbroken.training.metrics.rollouts import RolloutNumbers, rollout_metrics
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.metrics.writer import Metrics, MetricsWriter
from unbroken.training.outages import Collect, Outages
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

AroundStep: TypeAlias = Callable[[int], AbstractContextManager[None]]
"""Makes a context manager for a step's number, in which the step is made; for profilers."""


async def train(
    collect: Collect,
    *,
    trainer: Trainer,
    publisher: WeightPublisher | None,
    metrics: MetricsWriter | None,
    config: LoopConfig,
    on_step: OnStep | None = None,
    checkpoints: Checkpoints | None = None,
    before_step: BeforeStep | None = None,
    engine: Engine | None = None,
    after_step: AfterStep | None = None,
    on_rollouts: OnRollouts | None = None,
    around_step: AroundStep | None = None,
) -> None:
    """Train for `config.num_steps` steps, on policy: each step samples with the weights of the step before.

    The trainer's objective chooses what to train on. A step without anything to train on changes no weights and is
    logged with `train/num_rows` 0. `trainer` and the engine behind `publisher` begin with the same weights and version.

    With `before_step=engine.sleep` an engine of this process lends the trainer its memory: it sleeps from a step's last
    rollout until it gets the new weights; if the step fails, it stays asleep: the weights may be between two versions.

    Several processes (`accelerate launch`) each call this with their own `collect`. `publisher` is None on processes
    whose engine another process publishes to, and `metrics` on all but the first, which writes those of all. An error
    of one of them in what it is given (units, metrics, `on_step`, checkpoints, publishing) is raised on all.

    With `checkpoints`, a killed run goes on after the newest one: its weights are published, the metrics of its last
    step are written again in place of those from there on, and `on_step` is called for that step again.

    `engine` is what `collect` samples with if it may go away, such as an `HttpEngine`: the loop waits for it, publishes
    the weights again, and collects a step that lost rollouts again (`outages`), from the same rows if `checkpoints`
    have a `caller`. Without `engine` the first such loss ends the run.

    Raises:
        InvalidInputError: the engine has another vocabulary or newer weights, or the run has already made more steps.
        OutageError: the engine stayed away. With `checkpoints` nothing is lost: there is one to go on from.
        RolloutError: every rollout of a step failed; the first one's error is its cause.
        CheckpointError: a checkpoint cannot be written or read.
    """
    data = None if checkpoints is None else checkpoints.caller
    outages = Outages(trainer, collect, lambda: _publish(trainer, publisher), config, engine=engine, data=data)
    run = _Run(
        trainer=trainer, outages=outages, config=config, checkpoints=checkpoints, metrics=metrics, on_step=on_step,
        after_step=after_step,
        on_rollouts=on_rollouts,
    )  # fmt: skip
    try:
        await run.resume(engine)
        for step in range(run.num_steps, config.num_steps):
            with nullcontext() if around_step is None else around_step(step):
                await run.make(step, before_step)
    except OutageError as error:
        raise await run.save_after_outage(error) from error


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
class _Rollouts:
    """The groups that this process collected for one step."""

    groups: Sequence[TrajectoryGroup]
    counters: Counters
    started: float
    seconds: float
    """Without those lost to outages."""
    lost: Metrics


@dataclass(slots=True, kw_only=True)
class _Run:
    """The steps of one call of `train`."""

    trainer: Trainer
    outages: Outages
    config: LoopConfig
    checkpoints: Checkpoints | None
    metrics: MetricsWriter | None
    on_step: OnStep | None
    after_step: AfterStep | None
    on_rollouts: OnRollouts | None
    last: LastStep | None = None

    @property
    def num_steps(self) -> int:
        return 0 if self.last is None else self.last.num_steps

    async def resume(self, engine: Engine | None) -> None:
        """Go on after the newest checkpoint, if there is one."""
        version = self.trainer.policy_version
        if self.checkpoints is not None:
            self.last = await asyncio.to_thread(self.checkpoints.resume, self.trainer)
            if self.num_steps > self.config.num_steps:
                raise InvalidInputError(
                    f"LoopConfig.num_steps must be at least {self.num_steps}, the steps that the run in "
                    f"{self.checkpoints.folder} has made, got {self.config.num_steps}"
                )
        with self.trainer.fail_together():
            if self.checkpoints is not None and self.metrics is not None:
                self.metrics.cut(max(self.num_steps - 1, 0))
            if engine is not None:
                check_engine(engine, vocab_size=self.trainer.vocab_size, policy_version=self.trainer.policy_version)
        if self.last is not None:
            has_new_weights = self.trainer.policy_version != version
            logged = await self._publish_and_measure(self.last.metrics) if has_new_weights else self.last.metrics
            await self.end(self.num_steps - 1, logged)

    async def make(self, step: int, before_step: BeforeStep | None) -> None:
        """Make one step. A profiler shows its parts by their names."""
        with record_function("rollouts"):
            rollouts = await self.collect(step)
        with self.trainer.fail_together():
            units = await self.trainer.make_units(rollouts.groups, rollouts.counters)
        with record_function("train"):
            trained = await self.train(step, rollouts, units, before_step)
        await self.save(step, trained)
        with record_function("publish"):
            logged = await self.publish(trained)
        with record_function("after step"):
            await self.end(step, logged)

    async def collect(self, step: int) -> _Rollouts:
        started = time.perf_counter()
        groups = await self.outages.collect()
        _check_some_succeeded(groups, step, self.trainer)
        lost = self.outages.take_metrics()
        counters = Counters()
        for group in groups:
            counters.merge(group.counters)
        seconds = time.perf_counter() - started - lost["seconds/outages"]
        return _Rollouts(groups=groups, counters=counters, started=started, seconds=seconds, lost=lost)

    async def train(
        self, step: int, rollouts: _Rollouts, units: Sequence[Any], before_step: BeforeStep | None
    ) -> Metrics:
        """Train on the units, unless no process has any, and return the step's metrics."""
        trainer = self.trainer
        numbers = RolloutNumbers.of(rollouts.groups, rollouts.counters)
        everyone = RolloutNumbers.merge(trainer.from_all_processes(numbers))
        trained: Metrics = {"train/num_rows": 0, "train/policy_version": trainer.policy_version}
        is_trained = trainer.in_any_process(bool(units))
        if is_trained:
            with trainer.fail_together():
                if before_step is not None:
                    await before_step()
        if self.on_rollouts is not None:
            await self.on_rollouts(
                StepRollouts(
                    step=step,
                    groups=rollouts.groups,
                    units=units,
                    counters=rollouts.counters,
                    is_trained=is_trained,
                )
            )
        if is_trained:
            others = trainer.find_zero_variance(rollouts.groups)
            num_scored = self.config.num_zero_variance_scored
            zero_variance = await asyncio.to_thread(compare_zero_variance, trainer, others, num_scored=num_scored)
            trained = step_metrics(await asyncio.to_thread(trainer.step, units))
            trained = {**trained, **zero_variance.get_metrics(trained)}
        return {
            **rollout_metrics(everyone, collect_s=rollouts.seconds),
            **trainer.objective.get_metrics(units),
            **trained,
            **rollouts.lost,
            "seconds/collect": rollouts.seconds,
            "seconds/step": time.perf_counter() - rollouts.started,
        }

    async def save(self, step: int, trained: Metrics) -> None:
        self.last = LastStep(num_steps=step + 1, metrics=trained)
        if self.checkpoints is not None and self.checkpoints.is_due(step + 1, last=self.config.num_steps):
            await asyncio.to_thread(self.checkpoints.save, self.trainer, self.last)

    async def publish(self, trained: Metrics) -> Metrics:
        """Publish the weights if the step changed them, and return its metrics with those of publishing."""
        return await self._publish_and_measure(trained) if trained["train/num_rows"] else trained

    async def end(self, step: int, logged: Metrics) -> None:
        """Write the step's numbers, and do what comes after a step."""
        with self.trainer.fail_together():
            if self.metrics is not None:
                await asyncio.to_thread(self.metrics.write, step, logged)
            if self.on_step is not None:
                self.on_step(step, logged)
        if self.after_step is not None:
            await self.outages.repeat(partial(self.after_step, step + 1))

    async def save_after_outage(self, error: OutageError) -> OutageError:
        """Write a checkpoint of the last step, unless there is one, and add to the error where the run stands."""
        if self.checkpoints is None:
            return OutageError(f"{error}. The run had no `checkpoints` and begins anew when it is started again")
        if self.last is not None and not self.checkpoints.holds(self.num_steps):
            await asyncio.to_thread(self.checkpoints.save, self.trainer, self.last)
        return OutageError(
            f"{error}. The run stands after {self.num_steps} steps in {self.checkpoints.folder}: start it again once "
            "the engine is there, and it goes on from there"
        )

    async def _publish_and_measure(self, trained: Metrics) -> Metrics:
        update = await self.outages.publish()
        lost_s = self.outages.take_metrics()["seconds/outages"]
        if not trained["train/num_rows"]:
            return trained
        return {
            **trained,
            "weights/num_bytes": update.num_bytes,
            "weights/num_missed": len(update.missed_by),
            "seconds/publish": update.seconds,
            "seconds/outages": (trained["seconds/outages"] or 0) + lost_s,
            "seconds/step": (trained["seconds/step"] or 0) + update.seconds + lost_s,
        }


async def _publish(trainer: Trainer, publisher: WeightPublisher | None) -> WeightUpdate:
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


def _check_some_succeeded(groups: Sequence[TrajectoryGroup], step: int, trainer: Trainer) -> None:
    """Warn of failed rollouts; raise if those of all processes failed, or such a run would silently train nothing."""
    errors = [trajectory.error for group in groups for trajectory in group.trajectories]
    failed = [error for error in errors if error is not None]
    first_here = format_error(failed[0]) if failed else None
    everyone = trainer.from_all_processes((len(errors), len(failed), first_here))
    num_rollouts, num_failed = (sum(counts) for counts in list(zip(*everyone, strict=True))[:2])
    if num_failed == 0:
        return
    first = next(words for _, _, words in everyone if words is not None)
    if num_failed == num_rollouts:
        cause = failed[0] if failed else None
        raise RolloutError(f"all {num_failed} rollouts of step {step} failed, the first with {first}") from cause
    if trainer.is_main_process:
        _logger.warning("%d of %d rollouts of step %d failed, the first with %s", num_failed, num_rollouts, step, first)
