"""The loop: collect, build, step, save, publish, log. It knows neither messages nor renderers: `collect` does.

Engines that go away in between are the business of `outages`, through which it collects and publishes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from unbroken.counters import Counters
from unbroken.engines.base import Engine
from unbroken.errors import EngineError, InvalidInputError, OutageError, RolloutError
from unbroken.rollout.failures import format_error
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.checkpoints import Checkpoints, Resumed
from unbroken.training.checks import check_engine
from unbroken.training.config import LoopConfig
from unbroken.training.metrics.rollouts import RolloutNumbers, rollout_metrics
from unbroken.training.metrics.writer import Metrics, MetricsWriter, score_metrics, step_metrics
from unbroken.training.objective.advantages import AdvantageFn, OverStep
from unbroken.training.objective.pairs import PreferencePair, Preferences, build_pairs
from unbroken.training.objective.samples import build_samples
from unbroken.training.outages import Collect, Outages
from unbroken.training.trainer import Trainer
from unbroken.training.zero_variance import compare_unvaried
from unbroken.types import TrainingSample
from unbroken.weights.base import WeightPublisher, WeightUpdate

_logger = logging.getLogger(__name__)
BeforeStep: TypeAlias = Callable[[], Awaitable[None]]
"""Called when a step's groups are sampled and it has rows to train on: `SleepingEngine.sleep`, for one."""
OnStep: TypeAlias = Callable[[int, Metrics], None]
"""Called after each step with its number, from 0, and what was logged of it."""


async def train(
    collect: Collect,
    *,
    trainer: Trainer,
    publisher: WeightPublisher | None,
    advantages: AdvantageFn | OverStep | Preferences,
    metrics: MetricsWriter | None,
    config: LoopConfig,
    on_step: OnStep | None = None,
    checkpoints: Checkpoints | None = None,
    before_step: BeforeStep | None = None,
    engine: Engine | None = None,
) -> None:
    """Train for `config.num_steps` steps, on policy: each step's groups are sampled with the step before's weights.

    `advantages` is the algorithm: an advantage function for the policy gradient, `Preferences` for online DPO with a
    trainer that has a `TrainerConfig.dpo`.

    A step whose rows were all dropped changes no weights: it is logged with `train/num_rows` 0, and the next begins.
    `trainer` and the engine behind `publisher` begin with the same weights and the same policy version.

    With `before_step=engine.sleep` an engine of this process lends the trainer its memory: it sleeps from the last
    rollout of a step until it is given the new weights, and through no step that is dropped. Should the step fail, it
    stays asleep: the weights may be between two versions.

    Several processes (`accelerate launch`) each call this with their own `collect`. `publisher` is None on those whose
    engine another one publishes to, and `metrics` on all but the first: it is of the rollouts of all. What keeps
    one of them from publishing is raised on all.

    With `checkpoints`, a run that was killed goes on after the newest one: the weights are published, and what
    `metrics` holds of its last step and of later ones is written anew. `on_step` is told of that step (again).

    `engine` is what `collect` samples with and may go away, such as an `HttpEngine`: it is waited for, gets the weights
    again, and a step that lost rollouts is collected again (`outages`), from the same rows where `checkpoints` have a
    `caller`. Without it the first such loss ends the run.

    Raises:
        InvalidInputError: `Preferences` and a trainer of rows, or an advantage function and one of pairs; the engine
            has another vocabulary than the trainer, or newer weights; or the run has made more steps already.
        OutageError: the engine stayed away. Nothing is lost: a checkpoint stands where the run can go on.
        RolloutError: every rollout of a step failed; the first one's error is its cause.
        CheckpointError: a checkpoint cannot be written or read.
    """
    if isinstance(advantages, Preferences) != trainer.takes_pairs:
        raise InvalidInputError(
            f"advantages must be Preferences exactly if the trainer has a TrainerConfig.dpo, got {advantages!r} for a "
            f"trainer {'with' if trainer.takes_pairs else 'without'} one"
        )
    data = None if checkpoints is None else checkpoints.caller
    outages = Outages(trainer, collect, lambda: _publish(trainer, publisher), config, engine=engine, data=data)
    done: Resumed | None = None
    try:
        before = trainer.policy_version
        if checkpoints is not None:
            done = await asyncio.to_thread(checkpoints.resume, trainer)
            if done is not None and done.num_steps > config.num_steps:
                raise InvalidInputError(
                    f"LoopConfig.num_steps must be at least {done.num_steps}, the steps that the run in "
                    f"{checkpoints.folder} has made, got {config.num_steps}"
                )
            if metrics is not None:
                metrics.cut(0 if done is None else done.num_steps - 1)
        if engine is not None:
            check_engine(engine, vocab_size=trainer.vocab_size, policy_version=trainer.policy_version)
        if done is not None:
            moved = trainer.policy_version != before
            logged = await _published(done.metrics, outages) if moved else done.metrics
            await _log(done.num_steps - 1, logged, metrics, on_step)
        for step in range(0 if done is None else done.num_steps, config.num_steps):
            trained = await _step(step, outages, trainer, advantages, config, before_step)
            done = Resumed(num_steps=step + 1, metrics=trained)
            if checkpoints is not None and checkpoints.is_due(step + 1, last=config.num_steps):
                await asyncio.to_thread(checkpoints.save, trainer, num_steps=step + 1, metrics=trained)
            logged = await _published(trained, outages) if trained["train/num_rows"] else trained
            await _log(step, logged, metrics, on_step)
    except OutageError as error:
        raise await _stopped(error, done, checkpoints, trainer) from error


async def _step(
    step: int,
    outages: Outages,
    trainer: Trainer,
    advantages: AdvantageFn | OverStep | Preferences,
    config: LoopConfig,
    before_step: BeforeStep | None,
) -> Metrics:
    """Collect and train, and return what there is to log of it."""
    started = time.perf_counter()
    groups = await outages.collect()
    _check_some_succeeded(groups, step, trainer)
    lost = outages.take_metrics()
    seconds = time.perf_counter() - started - lost["seconds/outages"]
    counters = Counters()
    for group in groups:
        counters.merge(group.counters)
    scored: Metrics = {}
    samples: Sequence[TrainingSample] | Sequence[PreferencePair]
    if isinstance(advantages, Preferences):
        samples = pairs = await build_pairs(groups, advantages, counters)
        scored = score_metrics(pairs)
    else:
        samples = build_samples(groups, advantages, counters)
    numbers = RolloutNumbers.joined(trainer.from_all_processes(RolloutNumbers.of(groups, counters)))
    trained: Metrics = {"train/num_rows": 0, "train/policy_version": trainer.policy_version}
    if trainer.any_rows(samples):
        if before_step is not None:
            await before_step()
        zero = () if isinstance(advantages, Preferences) else groups  # pairs are not dropped for their advantages
        unvaried = await asyncio.to_thread(compare_unvaried, trainer, zero, num_scored=config.num_unvaried_scored)
        trained = step_metrics(await asyncio.to_thread(trainer.step, samples))
        trained = {**trained, **unvaried.metrics(trained)}
    return {
        **rollout_metrics(numbers, collect_s=seconds),
        **scored,
        **trained,
        **lost,
        "seconds/collect": seconds,
        "seconds/step": time.perf_counter() - started,
    }


async def _publish(trainer: Trainer, publisher: WeightPublisher | None) -> WeightUpdate:
    """Hand the trainer's weights to the engines. What keeps one process from it is raised on all, but for engines that
    are gone: `Outages` settles that between the processes.
    """
    started = time.perf_counter()
    weights = trainer.named_weights()
    update, gone, failure = None, None, None
    try:
        if publisher is not None:
            update = await publisher.publish(weights, policy_version=trainer.policy_version)
    except EngineError as error:
        gone = error
    except Exception as error:
        failure = error
    await asyncio.to_thread(trainer.finish_together, weights, failure)
    if gone is not None:
        raise gone
    return update or WeightUpdate(num_bytes=0, seconds=time.perf_counter() - started)


async def _published(trained: Metrics, outages: Outages) -> Metrics:
    """Publish, and add what that took to the step's metrics."""
    update = await outages.publish()
    lost_s = outages.take_metrics()["seconds/outages"]
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


async def _stopped(
    error: OutageError, done: Resumed | None, checkpoints: Checkpoints | None, trainer: Trainer
) -> OutageError:
    """The error, with where the run stands: a checkpoint is taken of it unless there is one."""
    if checkpoints is None:
        return OutageError(f"{error}. The run had no `checkpoints` and begins anew when it is started again")
    if done is not None and not checkpoints.holds(done.num_steps):
        await asyncio.to_thread(checkpoints.save, trainer, num_steps=done.num_steps, metrics=done.metrics)
    num_steps = 0 if done is None else done.num_steps
    return OutageError(
        f"{error}. The run stands after {num_steps} steps in {checkpoints.folder}, and goes on from there when it is "
        "started again once the engine is there"
    )


async def _log(step: int, logged: Metrics, metrics: MetricsWriter | None, on_step: OnStep | None) -> None:
    if metrics is not None:
        await asyncio.to_thread(metrics.write, step, logged)
    if on_step is not None:
        on_step(step, logged)


def _check_some_succeeded(groups: Sequence[TrajectoryGroup], step: int, trainer: Trainer) -> None:
    """One bad row must not end a run, and a run without a good one in any process must not go on in silence."""
    errors = [trajectory.error for group in groups for trajectory in group.trajectories]
    failed = [error for error in errors if error is not None]
    told = format_error(failed[0]) if failed else None
    everyone = trainer.from_all_processes((len(errors), len(failed), told))
    num_rollouts, num_failed = (sum(counts) for counts in list(zip(*everyone, strict=True))[:2])
    if num_failed == 0:
        return
    first = next(words for _, _, words in everyone if words is not None)
    if num_failed == num_rollouts:
        cause = failed[0] if failed else None
        raise RolloutError(f"all {num_failed} rollouts of step {step} failed, the first with {first}") from cause
    if trainer.is_main_process:
        _logger.warning("%d of %d rollouts of step %d failed, the first with %s", num_failed, num_rollouts, step, first)
