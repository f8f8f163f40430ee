"""The loop of training around its steps (`training.step`): what happens before the first of them and after the last."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from unbroken.engines.base import Engine
from unbroken.errors import InvalidInputError, OutageError
from unbroken.timeline import Timeline
from unbroken.training.checkpoints import Checkpoints, LastStep
from unbroken.training.checks import check_engine
from unbroken.training.config import LoopConfig
from unbroken.training.groups import GroupNumbers, GroupSource
from unbroken.training.metrics.step_log import StepLog
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.observer import RunObserver
from unbroken.training.outages import Outages
from unbroken.training.publication import Publication
from unbroken.training.queue import GroupQueue
from unbroken.training.step import StepRunner
from unbroken.training.trainer import Trainer
from unbroken.training.waits import Notices, fail_together, from_all_processes
from unbroken.training.warm_start import WarmStart
from unbroken.weights.base import WeightPublisher

_logger = logging.getLogger(__name__)
_MAX_STEADY_STALENESS = 4
"""The largest `max_staleness` with which no run of several seeds collapsed, whatever corrected for it."""


@asynccontextmanager
async def open_steps(
    source: GroupSource,
    *,
    trainer: Trainer,
    publisher: WeightPublisher | None,
    metrics: MetricsWriter | None,
    config: LoopConfig,
    observer: RunObserver | None = None,
    checkpoints: Checkpoints | None = None,
    engine: Engine | None = None,
    timeline: Timeline | None = None,
    warm_start: WarmStart | None = None,
) -> AsyncIterator[StepRunner]:
    """Open the steps of a run, which trains for `config.num_steps` steps on the groups of `source`.

        async with open_steps(source, trainer=trainer, publisher=publisher, metrics=None, config=config) as steps:
            await steps.run()  # the last weights are published, and the last checkpoint is written, by the block's end

    `source` samples with the weights last published. `trainer` and the engine behind `publisher` begin with the same
    weights and version. A step without anything to train on changes no weights. Training is on policy unless
    `config.max_staleness` is above 0; then the trainer's config should correct for older weights
    (`Objective.for_stale_rows`, docs/design/0017-asynchronous.md).

    Several processes (`accelerate launch`) each open them with their own `source`. `publisher` is None on processes
    whose engine another process publishes to, and `metrics` on all but the first, which writes those of all. An error
    of one of them in what it is given is raised on all.

    With `checkpoints`, a killed run continues after the newest one: its weights are published, the metrics of its last
    step are written again in place of those from there on, and `observer` sees that step again. If an engine has newer
    weights of a step that was lost, the version rises above theirs.

    `engine` is what `source` samples with if it may go away, such as an `HttpEngine`: the loop waits for it, publishes
    the weights again, and samples groups that lost rollouts again. Without `engine` the first such loss ends the run.
    `timeline` is not closed. With `warm_start`, the first of the steps train on its rows alone and sample nothing.

    Raises:
        InvalidInputError: the engine has another vocabulary or newer weights, the run has already made more steps, or
            something does not go together (`_check_run`).
        OutageError: the engine stayed away. With `checkpoints` nothing is lost: there is one to continue from.
        CheckpointError: a checkpoint cannot be written or read.
    """
    observer, timeline = observer or RunObserver(), timeline or Timeline()
    _check_run(source, trainer, observer, config)
    first_version = trainer.policy_version
    last = await _resume(trainer, checkpoints, metrics, config, engine)
    outages = Outages(trainer, publisher, config, engine=engine)
    queue = await _open_queue(source, trainer, config, outages, timeline, engine, last, warm_start)
    log = StepLog(is_ahead=config.max_staleness > 0, metrics=None if last is None else last.metrics)
    notices = await Notices.open(trainer)
    publication = Publication(trainer, publisher, queue, outages, notices, timeline=timeline, log=log)
    steps = StepRunner(
        trainer=trainer,
        queue=queue,
        publication=publication,
        outages=outages,
        config=config,
        checkpoints=checkpoints,
        metrics=metrics,
        observer=observer,
        timeline=timeline,
        log=log,
        last=last,
        warm_start=warm_start,
    )
    async with _closing(steps):
        if last is not None:
            await _end_again(steps, last, has_engine_version=trainer.policy_version == first_version)
        log.restart()
        yield steps


async def _open_queue(
    source: GroupSource,
    trainer: Trainer,
    config: LoopConfig,
    outages: Outages,
    timeline: Timeline,
    engine: Engine | None,
    last: LastStep | None,
    warm_start: WarmStart | None,
) -> GroupQueue:
    """Check that the engine is one of this trainer, and make the queue of groups that were not trained yet; the steps
    of a warm start take none.
    """
    num_supervised = 0 if warm_start is None else warm_start.num_steps
    async with fail_together(trainer):
        if engine is not None:
            check_engine(engine, vocab_size=trainer.vocab_size, policy_version=trainer.policy_version)
        state = None if last is None else last.groups
        if state is not None and state.get("choices") is not None:
            source.restore_choices(copy.deepcopy(state["choices"]))
        numbers = GroupNumbers(
            source.groups_per_step,
            num_steps=max(config.num_steps - num_supervised, 0),
            num_made=0 if last is None else max(last.num_steps - num_supervised, 0),
            state=state,
        )
        return GroupQueue(
            source=source,
            config=config,
            outages=outages,
            has_variance=partial(trainer.objective.has_variance, config=trainer.config),
            timeline=timeline,
            engine_version=trainer.policy_version,
            numbers=numbers,
        )


async def _resume(
    trainer: Trainer,
    checkpoints: Checkpoints | None,
    metrics: MetricsWriter | None,
    config: LoopConfig,
    engine: Engine | None,
) -> LastStep | None:
    """Restore the newest checkpoint, if there is one, with a version that no engine has other weights of.

    Servers may have weights of steps that are lost with a killed run, and take no older version.
    """
    if checkpoints is None:
        return None
    last = await asyncio.to_thread(checkpoints.resume, trainer)
    async with fail_together(trainer):
        if last is not None and last.num_steps > config.num_steps:
            raise InvalidInputError(
                f"loop.num_steps must be at least {last.num_steps}, the steps that the run in "
                f"{checkpoints.folder} has made, got {config.num_steps}"
            )
        if metrics is not None:
            metrics.cut(0 if last is None else last.num_steps - 1)
    if last is None:
        return None
    newest = 0 if engine is None else engine.policy_version
    if (newest := max(await from_all_processes(trainer, newest))) > trainer.policy_version:
        trainer.policy_version = newest + 1
    return last


async def _end_again(steps: StepRunner, last: LastStep, *, has_engine_version: bool) -> None:
    """Do again what a kill may have cut off after the last step that was made.

    `has_engine_version` says that the trainer has the version that it was made with, and so the weights with which the
    engine was opened: then there is nothing to publish.
    """
    if not has_engine_version:
        # A supervised step has none of these rows, and trains others.
        is_trained = last.metrics.get("train/num_rows") != 0
        was_published = is_trained and not steps.samples_nothing(last.num_steps)
        await steps.publication.publish(is_part_of_step=was_published)
    await steps.outages.repeat(steps.observer.on_resume)
    await steps.end(last.num_steps - 1, steps.log.end_step_of_another())


@asynccontextmanager
async def _closing(steps: StepRunner) -> AsyncIterator[None]:
    """When the block ends, wait until the last weights are published and the last checkpoint is written. After an
    error, cancel what runs beside the steps; after an outage, also write a checkpoint of the last step, unless there is
    one, and add to the error where the run stands.
    """
    checkpoints = steps.checkpoints
    try:
        yield
        await steps.publication.end()
        await steps.observer.settle()
        if checkpoints is not None:
            await asyncio.to_thread(checkpoints.finish, steps.trainer)
    except OutageError as error:
        if checkpoints is None:
            raise OutageError(
                f"{error}. The run had no `checkpoints` and begins anew when it is started again"
            ) from error
        await steps.observer.settle()
        await asyncio.to_thread(checkpoints.save_last, steps.trainer, steps.last)
        raise OutageError(
            f"{error}. The run stands after {steps.num_made} steps in {checkpoints.folder}: start it again once "
            "the engine is there, and it continues from there"
        ) from error
    finally:
        try:
            await steps.publication.close()
            await steps.queue.close()
        finally:
            if checkpoints is not None:
                await asyncio.to_thread(checkpoints.close)


def _check_run(source: GroupSource, trainer: Trainer, observer: RunObserver, config: LoopConfig) -> None:
    """Raise `InvalidInputError` for what does not go together; warn of more staleness than runs have held up to."""
    if not isinstance(source, GroupSource):
        raise InvalidInputError(
            f"source must be a GroupSource (groups_per_step, sample), which samples one group at a time, got {source!r}"
        )
    if config.max_staleness > 0 and observer.before_update is not None:
        raise InvalidInputError(
            "loop.max_staleness must be 0 with an engine that sleeps during steps (RunObserver.before_update), "
            "or it could not sample then"
        )
    if config.replaces_groups and not trainer.objective.can_lack_variance(trainer.config):
        raise InvalidInputError(
            "loop.max_replacements must be 0, because the trainer's objective leaves out no group for its equal "
            f"rewards, got {config.max_replacements:g}"
        )
    if config.max_staleness > _MAX_STEADY_STALENESS and trainer.is_main_process:
        _logger.warning(
            "loop.max_staleness is %d: runs of several seeds held up to %d, and above it some unlearned what they had "
            "learned; divide the learning rate by 4, or watch mismatch/k3 (docs/sampling-ahead.md)",
            config.max_staleness,
            _MAX_STEADY_STALENESS,
        )
