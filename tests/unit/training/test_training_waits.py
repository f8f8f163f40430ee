"""What a run waits for is in its log once that takes long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.loops import EachStep
from support.models import tiny_qwen3
from support.rows import group, trajectory
from support.steps import train
from support.waits import wait_until
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training import waits
from unbroken.training.config import LoopConfig, TrainerConfig
from unbroken.training.trainer import Trainer
from unbroken.training.waits import log_waiting
from unbroken.weights.base import WeightUpdate


@pytest.fixture(autouse=True)
def times(monkeypatch):
    monkeypatch.setattr(waits, "_AFTER_S", 0.05)
    monkeypatch.setattr(waits, "_EVERY_S", 0.05)


async def test_a_wait_is_logged_once_it_takes_long_and_then_now_and_again(caplog, monkeypatch):
    async with log_waiting("the engine"):
        await wait_until(lambda: caplog.text.count("waiting for the engine, for 0 s so far") >= 2)
    caplog.clear()
    monkeypatch.setattr(waits, "_AFTER_S", 60.0)
    async with log_waiting("the engine"):
        await asyncio.sleep(0.1)
    assert caplog.text == ""
    await wait_until(lambda: len(asyncio.all_tasks()) == 1)


async def test_a_publisher_that_takes_long_is_in_the_log(caplog):
    class Slow:
        async def publish(self, named_parameters: Any, *, policy_version: int) -> WeightUpdate:
            await asyncio.sleep(0.15)
            return WeightUpdate(num_bytes=1, seconds=0.15)

    async def sample(number: int) -> TrajectoryGroup:
        return group(trajectory(1.0), trajectory(0.0))

    trainer = Trainer(tiny_qwen3(), TrainerConfig())
    await train(EachStep(sample), trainer=trainer, publisher=Slow(), metrics=None, config=LoopConfig(num_steps=1))
    assert "waiting for policy version 1 to be taken by the engine, for 0 s so far" in caplog.text
