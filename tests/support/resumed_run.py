"""A small training run in a separate process, which may kill itself at a named point or be killed at any time.

Eight steps on a bandit. The source's generator draws the prompt and the seed with which the embedded engine samples, so
that the run repeats bit for bit.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemWriter

from support.loops import Callbacks
from support.models import tiny_qwen3
from support.rows import group, random_rows, trajectory
from support.steps import train
from unbroken.engines.transformers import TransformersEngine
from unbroken.rollout.seeds import EpochOrder
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.groups import GroupSource
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.objective.supervised import make_supervised_row
from unbroken.training.trainer import Trainer
from unbroken.training.warm_start import WarmStart
from unbroken.types import SampleRequest, SamplingParams, token_ids
from unbroken.weights.base import InProcessPublisher, WeightUpdate

NUM_STEPS = 8
SKIPPED_STEP = 3
"""Its rewards are all equal, so that it trains nothing."""
POINTS = ("collect", "state", "write", "finish", "publish", "published", "on_step")
"""Points at which a run can kill itself: when it begins to sample, is asked for its state, has written a part of
its tensors, has written all of them, publishes, has published, has logged."""


@dataclass
class KillAt:
    """SIGKILL to this process at one point of one step."""

    point: str | None = None
    step: int = 0
    now: int = 0
    """The step that the run is in."""

    def reached(self, point: str, step: int | None = None) -> None:
        """Kill the process if this is the point; `step` is the one that it is about, by default `now`."""
        if (point, self.now if step is None else step) == (self.point, self.step):
            os.kill(os.getpid(), signal.SIGKILL)


class _Bandit(GroupSource):
    """Samples groups of eight; the reward is the share of even numbers among the sampled ids."""

    groups_per_step = 1

    def __init__(self, engine: TransformersEngine, kill: KillAt) -> None:
        self._engine = engine
        self._kill = kill
        self._rng = np.random.default_rng(1)
        self._step = 0

    def choices(self) -> Mapping[str, Any]:
        """See `GroupSource`."""
        self._kill.reached("state")
        return {"rng": self._rng.bit_generator.state, "step": self._step}

    def restore_choices(self, choices: Mapping[str, Any], /) -> None:
        """See `GroupSource`."""
        self._rng.bit_generator.state = choices["rng"]
        self._step = choices["step"]

    async def sample(self, number: int) -> TrajectoryGroup:
        """See `GroupSource`."""
        assert number == self._step
        self._kill.now = self._step
        self._kill.reached("collect")
        prompt = self._rng.integers(0, 64, 3)
        params = SamplingParams(max_tokens=6, seed=int(self._rng.integers(2**31)))
        request = SampleRequest(request_id=str(self._step), prompt_ids=token_ids(prompt), params=params, n=8)
        sequences = (await self._engine.sample(request)).sequences
        rewards = [float(np.mean(sequence.completion_ids % 2 == 0)) for sequence in sequences]
        rewards = [1.0] * len(rewards) if self._step == SKIPPED_STEP else rewards
        self._step += 1
        pairs = zip(rewards, sequences, strict=True)
        return group(*[trajectory(reward, prompt=prompt.tolist(), completion=s) for reward, s in pairs])


class Publisher:
    """Publishes to the embedded engine, with points at which to kill the process."""

    def __init__(self, engine: TransformersEngine, kill: KillAt) -> None:
        self._inner = InProcessPublisher(engine)
        self._kill = kill

    async def publish(self, named_parameters: Any, *, policy_version: int) -> WeightUpdate:
        self._kill.reached("publish")
        update = await self._inner.publish(named_parameters, policy_version=policy_version)
        self._kill.reached("published")
        return update


class KillingCheckpoints(Checkpoints):
    """Checkpoints, with points at which half of the tensors are written, or all but the name of the folder."""

    kill: KillAt

    def _write(self, write: Any, folder: Path) -> None:
        write_data, finish, step = FileSystemWriter.write_data, FileSystemWriter.finish, int(folder.name[5:]) - 1

        def write_some(writer: Any, plan: Any, planner: Any) -> Any:
            write_data(writer, replace(plan, items=plan.items[::2]), planner)
            self.kill.reached("write", step)
            return write_data(writer, plan, planner)

        def finish_and_stop(writer: Any, *arguments: Any) -> None:
            finish(writer, *arguments)
            self.kill.reached("finish", step)

        if self.kill.point in ("write", "finish"):
            FileSystemWriter.write_data, FileSystemWriter.finish = write_some, finish_and_stop
        try:
            super()._write(write, folder)
        finally:
            FileSystemWriter.write_data, FileSystemWriter.finish = write_data, finish


def run(
    *, directory: str, every: int = 1, kill_at: str | None = None, kill_step: int = 0, num_supervised: int | None = None
) -> None:
    """Train, or continue to train, in `directory`; after the last step the weights are in `final.pt`.

    With `num_supervised` the first steps are a warm start, whose rows are trained beside the rollouts of the others.
    """
    asyncio.run(_run(Path(directory), every, KillAt(point=kill_at, step=kill_step), num_supervised))


def make_warm_start(num_steps: int) -> WarmStart:
    """Five conversations of one or two rows, two of them a step."""
    rows = [make_supervised_row(each.token_ids, each.loss_mask) for each in random_rows(np.random.default_rng(4), 7)]
    return WarmStart(
        conversations=[rows[:2], rows[2:3], rows[3:4], rows[4:5], rows[5:]],
        order=EpochOrder(5, seed=3, shuffle=True),
        num_steps=num_steps,
        per_step=2,
        learning_rate=3e-3,
        weight=0.3,
    )


async def _run(directory: Path, every: int, kill: KillAt, num_supervised: int | None) -> None:
    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_updates=6), num_minibatches=2, tokens_per_micro_batch=30
    )
    trainer = Trainer(tiny_qwen3(), config)
    engine = TransformersEngine(tiny_qwen3())
    bandit = _Bandit(engine, kill)
    checkpoints = KillingCheckpoints(directory / "checkpoints", every=every)
    checkpoints.kill = kill
    with MetricsWriter(directory) as metrics:
        await train(
            bandit,
            trainer=trainer,
            publisher=Publisher(engine, kill),
            metrics=metrics,
            config=LoopConfig(num_steps=NUM_STEPS),
            observer=Callbacks(on_step=lambda step, _: kill.reached("on_step", step)),
            checkpoints=checkpoints,
            warm_start=None if num_supervised is None else make_warm_start(num_supervised),
        )
    await engine.close()
    torch.save(dict(trainer.named_weights()), directory / "unnamed.pt")
    (directory / "unnamed.pt").rename(directory / "final.pt")
