"""The loop: collect, build, step, save, publish, log. It knows neither messages nor renderers: `collect` does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from unbroken.counters import Counters
from unbroken.errors import InvalidInputError, RolloutError
from unbroken.rollout.failures import in_words
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.advantages import AdvantageFn, OverStep
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig
from unbroken.training.metrics import (
    Metrics,
    MetricsWriter,
    counter_metrics,
    reward_metrics,
    score_metrics,
    step_metrics,
)
from unbroken.training.pairs import PreferencePair, Preferences, build_pairs
from unbroken.training.sample import build_samples
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample
from unbroken.weights.base import WeightPublisher

Collect: TypeAlias = Callable[[], Awaitable[Sequence[TrajectoryGroup]]]
"""Sample the groups of the next step with the weights last published."""
BeforeStep: TypeAlias = Callable[[], Awaitable[None]]
"""Called when a step's groups are sampled and it has rows to train on: `SleepingEngine.sleep`, for one."""
OnStep: TypeAlias = Callable[[int, Metrics], None]
"""Called after each step with its number, from 0, and what was logged of it."""


async def train(
    collect: Collect,
    *,
    trainer: Trainer,
    publisher: WeightPublisher,
    advantages: AdvantageFn | OverStep | Preferences,
    metrics: MetricsWriter,
    config: LoopConfig,
    on_step: OnStep | None = None,
    checkpoints: Checkpoints | None = None,
    before_step: BeforeStep | None = None,
) -> None:
    """Train for `config.num_steps` steps, on policy: each step's groups are sampled with the step before's weights.

    `advantages` is the algorithm: an advantage function for the policy gradient, `Preferences` for online DPO with a
    trainer that has a `TrainerConfig.dpo`.

    A step whose rows were all dropped changes no weights: it is logged with `train/num_rows` 0, and the next begins.
    `trainer` and the engine behind `publisher` begin with the same weights and the same policy version.

    With `before_step=engine.sleep` an engine of this process lends the trainer its memory: it sleeps from the last
    rollout of a step until it is given the new weights, and through no step that is dropped. Should the step fail, it
    stays asleep: the weights may be between two versions.

    With `checkpoints`, a run that was killed goes on after the newest one: the weights are published, and what
    `metrics` holds of its last step and of later ones is written anew. `on_step` is told of that step (again).

    Raises:
        InvalidInputError: `Preferences` and a trainer of rows, or an advantage function and one of pairs.
        RolloutError: every rollout of a step failed; the first one's error is its cause.
        CheckpointError: a checkpoint cannot be written or read.
    """
    if isinstance(advantages, Preferences) != trainer.takes_pairs:
        raise InvalidInputError(
            f"advantages must be Preferences exactly if the trainer has a TrainerConfig.dpo, got {advantages!r} for a "
            f"trainer {'with' if trainer.takes_pairs else 'without'} one"
        )
    first_step = 0
    if checkpoints is not None:
        before = trainer.policy_version
        resumed = await asyncio.to_thread(checkpoints.resume, trainer)
        metrics.cut(0 if resumed is None else resumed.num_steps - 1)
        if resumed is not None:
            first_step = resumed.num_steps
            moved = trainer.policy_version != before
            logged = await _published(resumed.metrics, trainer, publisher) if moved else resumed.metrics
            await _log(first_step - 1, logged, metrics, on_step)
    for step in range(first_step, config.num_steps):
        trained = await _step(step, collect, trainer, advantages, before_step)
        if checkpoints is not None and checkpoints.is_due(step + 1, last=config.num_steps):
            await asyncio.to_thread(checkpoints.save, trainer, num_steps=step + 1, metrics=trained)
        logged = await _published(trained, trainer, publisher) if trained["train/num_rows"] else trained
        await _log(step, logged, metrics, on_step)


async def _step(
    step: int,
    collect: Collect,
    trainer: Trainer,
    advantages: AdvantageFn | OverStep | Preferences,
    before_step: BeforeStep | None,
) -> Metrics:
    """Collect and train, and return what there is to log of it."""
    started = time.perf_counter()
    groups = await collect()
    _check_some_succeeded(groups, step)
    seconds = time.perf_counter() - started
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
    trained: Metrics = {"train/num_rows": 0, "train/policy_version": trainer.policy_version}
    if trainer.any_rows(samples):
        if before_step is not None:
            await before_step()
        trained = step_metrics(await asyncio.to_thread(trainer.step, samples))
    return {
        **reward_metrics(groups),
        **scored,
        **counter_metrics(counters),
        **trained,
        "seconds/collect": seconds,
        "seconds/step": time.perf_counter() - started,
    }


async def _published(trained: Metrics, trainer: Trainer, publisher: WeightPublisher) -> Metrics:
    """Hand the trainer's weights to the engines, and add what that took to the step's metrics."""
    update = await publisher.publish(trainer.named_weights(), policy_version=trainer.policy_version)
    if not trained["train/num_rows"]:
        return trained
    return {
        **trained,
        "weights/num_bytes": update.num_bytes,
        "seconds/publish": update.seconds,
        "seconds/step": (trained["seconds/step"] or 0) + update.seconds,
    }


async def _log(step: int, logged: Metrics, metrics: MetricsWriter, on_step: OnStep | None) -> None:
    await asyncio.to_thread(metrics.write, step, logged)
    if on_step is not None:
        on_step(step, logged)


def _check_some_succeeded(groups: Sequence[TrajectoryGroup], step: int) -> None:
    """One bad row must not end a run, and a run without a good one must not go on in silence."""
    errors = [trajectory.error for group in groups for trajectory in group.trajectories]
    first = errors[0] if errors else None
    if first is not None and all(error is not None for error in errors):
        raise RolloutError(
            f"all {len(errors)} rollouts of step {step} failed, the first with {in_words(first)}"
        ) from first
