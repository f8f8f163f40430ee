"""An asynchronous run in a separate process, which may be killed at any time; each step's groups are in a file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from support.loops import Callbacks
from support.models import tiny_qwen3
from support.resumed_run import KillAt
from support.rows import group, trajectory
from support.steps import train
from unbroken.engines.transformers import TransformersEngine
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.groups import GroupSource
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.trainer import Trainer
from unbroken.types import SampleRequest, SamplingParams, token_ids
from unbroken.weights.base import InProcessPublisher, WeightUpdate

NUM_STEPS = 8
GROUPS_PER_STEP = 3


class Source(GroupSource):
    """Groups of four; every fifth number has ten times as many ids as the others."""

    groups_per_step = GROUPS_PER_STEP

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine

    async def sample(self, number: int) -> TrajectoryGroup:
        """See `GroupSource`."""
        params = SamplingParams(max_tokens=60 if number % 5 == 0 else 6, seed=number)
        request = SampleRequest(request_id=str(number), prompt_ids=token_ids([1, number]), params=params, n=4)
        sequences = (await self._engine.sample(request)).sequences
        rewards = [float((sequence.completion_ids % 2 == 0).mean()) for sequence in sequences]
        pairs = zip(rewards, sequences, strict=True)
        members = [trajectory(reward, prompt=[1, number], completion=s, name=str(number)) for reward, s in pairs]
        return group(*members)


class Publisher:
    """Publishes to the embedded engine beside the next step: a version says which step made it, for each makes one."""

    def __init__(self, engine: TransformersEngine, kill: KillAt) -> None:
        self._inner = InProcessPublisher(engine)
        self._kill = kill

    async def publish(self, named_parameters: Any, *, policy_version: int) -> WeightUpdate:
        """See `WeightPublisher`."""
        self._kill.reached("publish", policy_version - 1)
        update = await self._inner.publish(named_parameters, policy_version=policy_version)
        self._kill.reached("published", policy_version - 1)
        return update


def run(*, directory: str, max_staleness: int = 2, kill_at: str | None = None, kill_step: int = 0) -> None:
    """Train, or continue to train, in `directory`."""
    asyncio.run(_run(Path(directory), max_staleness, KillAt(point=kill_at, step=kill_step)))


async def _run(directory: Path, max_staleness: int, kill: KillAt) -> None:
    config = PolicyGradient().for_stale_rows(TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-3)))
    trainer = Trainer(tiny_qwen3(), config)
    engine = TransformersEngine(tiny_qwen3())

    async def on_rollouts(rollouts: Any) -> None:
        kill.reached("collect", rollouts.step)
        numbers = [int(each.trajectories[0].trajectory_id) for each in rollouts.groups]
        (directory / f"trained-{rollouts.step}.json").write_text(json.dumps(numbers))

    with MetricsWriter(directory) as metrics:
        await train(
            Source(engine),
            trainer=trainer,
            publisher=Publisher(engine, kill),
            metrics=metrics,
            config=LoopConfig(num_steps=NUM_STEPS, max_staleness=max_staleness),
            observer=Callbacks(on_step=lambda step, _: kill.reached("on_step", step), on_rollouts=on_rollouts),
            checkpoints=Checkpoints(directory / "checkpoints", every=1),
        )
    await engine.close()
