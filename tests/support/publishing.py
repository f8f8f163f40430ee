"""Compare an engine's logprobs with the trainer's, and run a training loop of several processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from support.loops import EachStep
from support.models import tiny_qwen3
from support.rows import group, row, trajectory
from support.sequences import sampled
from support.sharded import shared
from support.steps import train
from unbroken.engines.base import Engine
from unbroken.engines.transformers import TransformersEngine
from unbroken.rollout.trajectory import TrajectoryGroup, TrajectoryStatus
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.trainer import Trainer
from unbroken.weights.base import InProcessPublisher, WeightUpdate

PROBE = row([3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9], sampled=range(1, 14))
"""A row whose ids both sides score."""


async def mismatch(trainer: Trainer, engine: Engine) -> float:
    """The largest difference between a logprob of the trainer and the engine's."""
    ours = (await asyncio.to_thread(trainer.logprobs, [PROBE]))[0][1:]
    theirs = (await engine.score(PROBE.token_ids)).logprobs
    return float(np.abs(ours - theirs).max())


class FullDisk:
    """A publisher that fails once it has taken two weights."""

    async def publish(self, named_parameters: Iterable[tuple[str, Any]], *, policy_version: int) -> WeightUpdate:
        assert len(list(islice(named_parameters, 2))) == 2
        raise OSError("no space left on device")


def _make_group(version: int, rank: int) -> TrajectoryGroup:
    """The second process has equal rewards, and trains only on the distance to the reference."""
    arms = ((9, 1.0 - rank), (10, 0.0), (11, 0.0))
    members = [trajectory(r, completion=sampled(arm, 7, versions=[version] * 2)) for arm, r in arms]
    return group(*members, trajectory(None, status=TrajectoryStatus.FAILED, completion=None))


def run(name: str, parallel: ParallelConfig, accelerator: Accelerator, rank: int, directory: Path) -> None:
    """Train two steps that the first process publishes, and a third one that it fails to publish."""
    checkpoints = directory / f"loop-{name}" / "checkpoints"
    keeper = Checkpoints(checkpoints, every=1, num_kept=1)
    found = asyncio.run(_run(parallel, accelerator, rank, directory / f"loop-{name}", keeper))
    found["checkpoints"] = sorted(path.name for path in checkpoints.iterdir())
    (directory / f"loop-{name}-{rank}.json").write_text(json.dumps(found))


async def _run(
    parallel: ParallelConfig, accelerator: Accelerator, rank: int, directory: Path, checkpoints: Checkpoints
) -> dict[str, Any]:
    config = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-2), kl_weight=0.1, parallel=parallel)
    model, reference = (shared(tiny_qwen3(seed=seed), parallel) for seed in (0, 1))
    trainer = Trainer(model, config, accelerator=accelerator, reference=reference)
    engine = TransformersEngine(tiny_qwen3())
    metrics = MetricsWriter(directory) if rank == 0 else None
    error_text = ""

    async def sample(number: int) -> TrajectoryGroup:
        return _make_group(trainer.policy_version, rank)

    for num_steps, publisher in ((2, InProcessPublisher(engine)), (3, FullDisk())):
        try:
            await train(
                EachStep(sample),
                trainer=trainer,
                publisher=publisher if rank == 0 else None,
                metrics=metrics,
                config=LoopConfig(num_steps=num_steps),
                checkpoints=checkpoints,
            )
        except Exception as error:
            error_text = f"{type(error).__name__}: {error}"
        if num_steps == 2:
            published = await mismatch(trainer, engine)
    await engine.close()
    if metrics is not None:
        metrics.close()
    return {"published": published, "version": engine.policy_version, "error": error_text}
