"""A disk that is full while weights, checkpoints or metrics are written: the run ends with what to do, and goes on."""

from __future__ import annotations

import json
import resource
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import wait
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from support.models import tiny_qwen3
from support.rows import make_source
from support.servers import listening, make_app, server_tokenizer
from support.steps import train
from unbroken.client import AsyncClient
from unbroken.engines.http import HttpEngine
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import CheckpointError, MetricsError, WeightsError
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.trainer import Trainer
from unbroken.weights.base import WeightUpdate
from unbroken.weights.disk import DiskPublisher

NUM_STEPS = 4


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes: to the writer, the disk is full there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Full:
    """When the disk is full: while the second step does one thing, once."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.num_calls = 0

    @contextmanager
    def at(self, what: str, num_bytes: int = 1000) -> Iterator[None]:
        self.num_calls += what == self.what
        is_now = what == self.what and self.num_calls == 2
        with room_for(num_bytes) if is_now else nullcontext():
            yield


class FullCheckpoints(Checkpoints):
    full: Full

    def save(self, *arguments, **keywords) -> None:
        with self.full.at("checkpoint"):
            super().save(*arguments, **keywords)
            wait([self._writing] if self._writing else [])  # what else is written meanwhile has room


class FullMetrics(MetricsWriter):
    full: Full

    def write(self, *arguments) -> None:
        size = next(self._directory.glob("*.jsonl")).stat().st_size
        with self.full.at("metrics", size + 20):
            super().write(*arguments)


class FullPublisher(DiskPublisher):
    full: Full

    async def publish(self, *arguments, **keywords) -> WeightUpdate:
        with self.full.at("weights"):
            return await super().publish(*arguments, **keywords)


async def run(directory: Path, client: AsyncClient, full: Full) -> Trainer:
    """Train, or go on training, against one server."""
    config = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-2))
    trainer = Trainer(tiny_qwen3(vocab_size=len(server_tokenizer())), config)

    checkpoints = FullCheckpoints(directory / "checkpoints", every=1)
    publisher = FullPublisher([client], directory / "weights")
    engine = await HttpEngine.connect([client.base_url])
    try:
        with FullMetrics(directory) as metrics:
            metrics.full = checkpoints.full = publisher.full = full
            await train(
                make_source(trainer),
                trainer=trainer,
                publisher=publisher,
                metrics=metrics,
                config=LoopConfig(num_steps=NUM_STEPS),
                checkpoints=checkpoints,
                engine=engine,
            )
    finally:
        await engine.close()
    return trainer


@asynccontextmanager
async def server(directory: Path) -> AsyncIterator[AsyncClient]:
    engine = TransformersEngine(tiny_qwen3(vocab_size=len(server_tokenizer())))
    async with (
        listening(make_app(engine, weights_dir=directory / "weights")) as url,
        AsyncClient(url, max_retries=0) as client,
    ):
        yield client
    await engine.close()


@pytest.mark.parametrize(
    ("what", "error", "message", "version"),
    [
        ("checkpoint", CheckpointError, r"step-00000002 cannot be written: .*too large.*earlier ones are unchanged", 2),
        ("weights", WeightsError, r"version 2 of the weights cannot be written.*too large.*make room", 1),
        ("metrics", MetricsError, r"metrics of step 1 cannot be written to .*: File too large. Free space", 2),
    ],
)
async def test_a_full_disk_ends_the_run_and_nothing_is_lost(tmp_path, what, error, message, version):
    async with server(tmp_path / "whole") as client:
        whole = await run(tmp_path / "whole", client, Full("nothing"))
    async with server(tmp_path / "full") as client:
        with pytest.raises(error, match=message):
            await run(tmp_path / "full", client, Full(what))
        assert await client.policy_version() == version
        assert await client.health()
        trainer = await run(tmp_path / "full", client, Full("nothing"))
        # Without the checkpoint of the second step, its version is never given to other weights.
        assert await client.policy_version() == (NUM_STEPS + 2 if what == "checkpoint" else NUM_STEPS)
    lines = (tmp_path / "full" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(NUM_STEPS))
    for (name, weight), (_, other) in zip(trainer.named_weights(), whole.named_weights(), strict=True):
        assert torch.equal(weight, other), name
