"""An engine in a server outlives the trainer: the next one goes on with the versions that the engine has."""

from __future__ import annotations

import json

import pytest
import torch

from support.models import tiny_qwen3
from support.rows import group, trajectory
from support.steps import train
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import InvalidInputError
from unbroken.server.weights import WeightLoader
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.groups import GroupSource
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.trainer import Trainer
from unbroken.types import InFlight, SampleRequest, SamplingParams, token_ids
from unbroken.weights.base import WeightUpdate
from unbroken.weights.files import write_weights

NUM_STEPS = 4


class TrainerDiedError(Exception):
    """The trainer is gone."""


class ToServer:
    """Publishes as `DiskPublisher` does, to the part of a server that takes weights; may die before or after."""

    def __init__(self, loader: WeightLoader, folder, *, dies: str | None = None) -> None:
        self.loader, self.folder, self.dies = loader, folder, dies
        self.was_new: list[bool] = []

    async def publish(self, named_parameters, *, policy_version: int) -> WeightUpdate:
        if (policy_version, self.dies) == (2, "before"):
            raise TrainerDiedError
        files = write_weights(self.folder, named_parameters, policy_version=policy_version)
        self.was_new.append(
            await self.loader.load(
                files.folder, policy_version=policy_version, reuse_kv=False, in_flight=InFlight.PAUSE
            )
        )
        if (policy_version, self.dies) == (2, "after"):
            raise TrainerDiedError
        return WeightUpdate(num_bytes=files.num_bytes, seconds=0.0)


class Run(GroupSource):
    """One engine, and as many trainers as it takes."""

    def __init__(self, directory, engine: TransformersEngine | None = None) -> None:
        self.directory = directory
        self.engine = engine or TransformersEngine(tiny_qwen3())
        self.loader = WeightLoader(self.engine, directory / "weights")

    groups_per_step = 1

    async def sample(self, number: int):
        seed = self.engine.policy_version
        params = SamplingParams(max_tokens=4, seed=seed)
        request = SampleRequest(request_id=str(seed), prompt_ids=token_ids([1, 2]), params=params, n=4)
        sequences = (await self.engine.sample(request)).sequences
        return group(*[trajectory(float(k), prompt=(1, 2), completion=s) for k, s in enumerate(sequences)])

    async def train(self, *, dies: str | None = None, every: int = 1) -> tuple[Trainer, ToServer]:
        config = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-2))
        trainer, publisher = Trainer(tiny_qwen3(), config), ToServer(self.loader, self.directory / "weights", dies=dies)
        with MetricsWriter(self.directory) as metrics:
            await train(
                self,
                trainer=trainer,
                publisher=publisher,
                metrics=metrics,
                config=LoopConfig(num_steps=NUM_STEPS),
                checkpoints=Checkpoints(self.directory / "checkpoints", every=every),
                engine=self.engine,
            )
        return trainer, publisher


@pytest.mark.parametrize(("dies", "was_new"), [("before", [True, True, True]), ("after", [False, True, True])])
async def test_i6_a_new_trainer_goes_on_with_the_engine_of_the_one_that_died(tmp_path, dies, was_new):
    whole, broken = Run(tmp_path / "whole"), Run(tmp_path / "broken")
    expected, _ = await whole.train()
    with pytest.raises(TrainerDiedError):
        await broken.train(dies=dies)
    trainer, publisher = await broken.train()
    assert publisher.was_new == was_new
    assert broken.engine.policy_version == trainer.policy_version == NUM_STEPS
    for (name, weight), (_, other) in zip(trainer.named_weights(), expected.named_weights(), strict=True):
        assert torch.equal(weight, other), name
    for run in (whole, broken):
        await run.engine.close()


async def test_i6_a_new_trainer_with_an_older_checkpoint_goes_on_above_the_engines_version(tmp_path):
    """The second step is lost with the trainer, and its weights, version 2, must never be taken for others."""
    run = Run(tmp_path)
    with pytest.raises(TrainerDiedError):
        await run.train(dies="after", every=3)
    assert run.engine.policy_version == 2
    trainer, publisher = await run.train(every=3)
    assert all(publisher.was_new)
    logged = (tmp_path / "metrics.jsonl").read_text().splitlines()
    versions = [json.loads(line)["train/policy_version"] for line in logged]
    assert versions == [1, 4, 5, 6]
    assert run.engine.policy_version == trainer.policy_version == 6
    await run.engine.close()


async def test_a_run_without_a_checkpoint_refuses_an_engine_with_weights_of_another_run(tmp_path):
    run = Run(tmp_path)
    await run.train()
    with pytest.raises(InvalidInputError, match="the engine has policy version 4 and the trainer 0"):
        await Run(tmp_path / "other", run.engine).train()
    await run.engine.close()
