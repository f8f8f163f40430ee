"""The loop: collect, build, step, publish, log. It knows neither messages nor renderers: `collect` does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from unbroken.counters import Counters
from unbroken.errors import RolloutError
from unbroken.rollout.failures import in_words
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.advantages import AdvantageFn
from unbroken.training.config import LoopConfig
from unbroken.training.metrics import Metrics, MetricsWriter, counter_metrics, reward_metrics, step_metrics
from unbroken.training.sample import build_samples
from unbroken.training.trainer import Trainer
from unbroken.weights.base import WeightPublisher

Collect: TypeAlias = Callable[[], Awaitable[Sequence[TrajectoryGroup]]]
"""Sample the groups of the next step with the weights last published."""
OnStep: TypeAlias = Callable[[int, Metrics], None]
"""Called after each step with its number, from 0, and what was logged of it."""


async def train(
    collect: Collect,
    *,
    trainer: Trainer,
    publisher: WeightPublisher,
    advantages: AdvantageFn,
    metrics: MetricsWriter,
    config: LoopConfig,
    on_step: OnStep | None = None,
) -> None:
    """Train for `config.num_steps` steps, on policy: each step's groups are sampled with the step before's weights.

    A step whose rows were all dropped changes no weights: it is logged with `train/num_rows` 0, and the next begins.
    `trainer` and the engine behind `publisher` begin with the same weights and the same policy version.

    Raises:
        RolloutError: every rollout of a step failed; the first one's error is its cause.
    """
    for step in range(config.num_steps):
        started = time.perf_counter()
        groups = await collect()
        _check_some_succeeded(groups, step)
        collected = time.perf_counter()
        counters = Counters()
        for group in groups:
            counters.merge(group.counters)
        samples = build_samples(groups, advantages, counters)
        if trainer.any_rows(samples):
            stats = await asyncio.to_thread(trainer.step, samples)
            update = await publisher.publish(trainer.named_weights(), policy_version=stats.policy_version)
            trained = {
                **step_metrics(stats),
                "weights/num_bytes": update.num_bytes,
                "seconds/publish": update.seconds,
            }
        else:
            trained = {"train/num_rows": 0, "train/policy_version": trainer.policy_version}
        seconds = {"seconds/collect": collected - started, "seconds/step": time.perf_counter() - started}
        logged = {**reward_metrics(groups), **counter_metrics(counters), **trained, **seconds}
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
