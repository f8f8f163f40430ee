"""The training loop: collect, make units, step, save, publish, log. It knows neither messages nor renderers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeAlias

from torch.profiler import record_function

from unbroken.engines.base import Engine
from unbroken.errors import InvalidInputError, OutageError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.timeline import Timeline
from unbroken.training.agreement import fail_together
from unbroken.training.asynchronous.events import Observer
from unbroken.training.asynchronous.numbers import GroupNumbers
from unbroken.training.asynchronous.source import ChoosingSource, GroupSource
from unbroken.training.asynchronous.training import train_asynchronously
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig
from unbroken.training.filling import FilledStep, StepFiller
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.outages import Collect, Outages
from unbroken.training.snapshots import Snapshots
from unbroken.training.steps import (
    AfterStep,
    BeforeStep,
    Collected,
    OnRollouts,
    OnStep,
    Steps,
    check_some_succeeded,
    publish_together,
)
from unbroken.training.trainer import Trainer
from unbroken.weights.base import WeightPublisher

AroundStep: TypeAlias = Callable[[int], AbstractContextManager[None]]
"""Makes a context manager for a step's number, in which the step is made; for profilers."""


async def train(
    collect: Collect | GroupSource,
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
    observer: Observer | None = None,
    timeline: Timeline | None = None,
    needs_engine: Callable[[int], bool] = lambda num_steps: True,
    snapshots: Snapshots | None = None,
    other_engines: Sequence[Engine] = (),
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
    step are written again in place of those from there on, and `on_step` is called for that step again. If `engine`, or
    one of the `other_engines` that the caller publishes to, has newer weights of a step that was lost, the run goes on
    with a version above theirs.

    `engine` is what `collect` samples with if it may go away, such as an `HttpEngine`: the loop waits for it, publishes
    the weights again, and collects a step that lost rollouts again (`outages`), from the same rows if `checkpoints`
    have a `caller`. Without `engine` the first such loss ends the run.

    With `config.max_replacements` above 0, groups whose rewards are all equal are replaced by those of further problems
    (dynamic sampling): `collect` is then a `GroupSource`, whose groups are sampled one by one. So it is if it is a
    `ChoosingSource`, which gets each group's result and chooses the next problems.

    With `config.max_staleness` above 0 the engine samples while the trainer trains (docs/design/0017-asynchronous.md).
    Then, too, `collect` is a `GroupSource`, and the trainer's config should correct for older weights
    (`Objective.for_stale_rows`). `observer` sees what happens when, and `needs_engine` says whether `after_step`
    samples after this number of steps: it then waits until the weights are published.

    `timeline` gets a slice for all that is done and, with `max_staleness`, for each group; it is not closed.
    `snapshots` are the trainer's, if `after_step` takes copies of its weights too: each version is copied once.

    Raises:
        InvalidInputError: the engine has another vocabulary or newer weights, or the run has already made more steps;
            with `max_staleness` or `max_replacements`, `collect` is no `GroupSource`; with the first, the engine would
            sleep; with the second, the objective leaves out no groups.
        OutageError: the engine stayed away. With `checkpoints` nothing is lost: there is one to go on from.
        RolloutError: every rollout of a step failed, and the first one's error is its cause; or
            `config.max_empty_steps` steps in a row taught nothing.
        CheckpointError: a checkpoint cannot be written or read.
    """
    source = _check_source(collect, config, before_step)
    numbers = None if source is None else _make_numbers(source, config)
    filler = _make_filler(source, numbers, config, trainer)
    data = None if checkpoints is None else checkpoints.caller
    publish = partial(publish_together, trainer, publisher)
    sample = _find_collect(collect, config) if filler is None else filler.collect
    outages = Outages(trainer, sample, publish, config, engine=engine, data=data)
    steps = Steps(
        trainer=trainer, publisher=publisher, outages=outages, config=config, checkpoints=checkpoints, metrics=metrics,
        on_step=on_step, before_step=before_step, after_step=after_step, on_rollouts=on_rollouts,
        timeline=timeline or Timeline(), has_numbers=numbers is not None,
        snapshots=snapshots or Snapshots(trainer, is_sender=publisher is not None),
    )  # fmt: skip
    around = around_step or (lambda step: nullcontext())
    try:
        await steps.resume(engine, other_engines)
        if source is not None and numbers is not None:
            async with fail_together(trainer):
                last = None if steps.last is None else steps.last.groups
                numbers.resume(last, steps.num_steps * source.groups_per_step)
        if source is not None and numbers is not None and filler is None:
            await train_asynchronously(
                source, numbers, steps, around=around, observer=observer, needs_engine=needs_engine
            )
        else:
            for step in range(steps.num_steps, config.num_steps):
                with around(step):
                    await _make(step, steps, filler)
        if checkpoints is not None:
            await asyncio.to_thread(checkpoints.finish, trainer)
    except OutageError as error:
        raise await steps.save_after_outage(error) from error
    finally:
        if checkpoints is not None:
            await asyncio.to_thread(checkpoints.close)


async def _make(step: int, steps: Steps, filler: StepFiller | None) -> None:
    """Make one step. A profiler shows its parts by their names."""
    with record_function("rollouts"), steps.timeline.span("collect", step=step):
        collected = await _collect(step, steps, filler)
    with steps.timeline.span(f"step {step}", version=steps.trainer.policy_version):
        trained = await steps.train(collected)
        trained = await steps.save(step, trained, groups=None if filler is None else filler.numbers.state())
    with record_function("publish"), steps.timeline.span("publish", version=steps.trainer.policy_version):
        logged = await steps.publish(trained)
    with record_function("after step"):
        await steps.end(step, logged)


async def _collect(step: int, steps: Steps, filler: StepFiller | None) -> Collected:
    started = time.perf_counter()
    sampled = await steps.outages.collect()
    await check_some_succeeded(sampled, step, steps.trainer)
    filled = FilledStep(groups=sampled)
    if filler is not None:
        async with fail_together(steps.trainer):
            filled = filler.take()
    lost = steps.outages.take_metrics()
    seconds = time.perf_counter() - started - lost["seconds/outages"]
    return Collected(
        step=step,
        groups=filled.groups,
        replaced=filled.replaced,
        counters=Collected.count(sampled),
        started=started,
        seconds=seconds,
        sampling_s=seconds,
        metrics=lost,
    )


def _check_source(
    collect: Collect | GroupSource, config: LoopConfig, before_step: BeforeStep | None
) -> GroupSource | None:
    """What samples the groups one by one; None if it need not."""
    if config.max_staleness == 0 and not config.replaces_groups and not isinstance(collect, ChoosingSource):
        return None
    if not isinstance(collect, GroupSource):
        raise InvalidInputError(
            "LoopConfig.max_staleness or max_replacements above 0 needs a GroupSource (groups_per_step, sample), which "
            f"samples one group at a time, got {collect!r}"
        )
    if config.max_staleness > 0 and before_step is not None:
        raise InvalidInputError(
            "LoopConfig.max_staleness must be 0 with an engine that sleeps during steps (before_step), or it could not "
            "sample meanwhile"
        )
    return collect


def _make_numbers(source: GroupSource, config: LoopConfig) -> GroupNumbers:
    chooser = source if isinstance(source, ChoosingSource) else None
    return GroupNumbers(config.num_steps * source.groups_per_step, chooser=chooser)


def _make_filler(
    source: GroupSource | None, numbers: GroupNumbers | None, config: LoopConfig, trainer: Trainer
) -> StepFiller | None:
    """What collects a step's groups one by one; None if they are sampled all together, or ahead of the trainer."""
    if config.replaces_groups and not trainer.can_lack_variance:
        raise InvalidInputError(
            "LoopConfig.max_replacements must be 0, because the trainer's objective leaves out no group for its equal "
            f"rewards, got {config.max_replacements:g}"
        )
    if source is None or numbers is None or config.max_staleness > 0:
        return None
    max_replaced = config.get_max_replaced(source.groups_per_step)
    return StepFiller(source, numbers, has_variance=trainer.has_variance, max_replaced=max_replaced)


def _find_collect(collect: Collect | GroupSource, config: LoopConfig) -> Collect:
    """What collects the groups of a step; asynchronously, nothing may."""
    if config.max_staleness > 0:
        return _refuse_to_collect
    if not callable(collect):
        raise InvalidInputError(
            f"LoopConfig.max_staleness 0 needs a function that collects the groups of a step, got {collect!r}"
        )
    return collect


async def _refuse_to_collect() -> Sequence[TrajectoryGroup]:
    raise AssertionError("the asynchronous loop takes groups from its source")
