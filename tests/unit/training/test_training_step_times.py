"""The parts of a step add up to the wall clock, whatever a step does."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from support.loops import Callbacks
from support.models import tiny_qwen3
from support.rows import group, trajectory
from support.steps import train
from unbroken.engines.transformers import TransformersEngine
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig, TrainerConfig
from unbroken.training.groups import GroupSource
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.trainer import Trainer
from unbroken.types import SampleRequest, SamplingParams, token_ids
from unbroken.weights.base import InProcessPublisher

PROMPT = (1, 2)
PAUSE_S = 0.05
PARTS = (
    "log", "after_step", "collect", "units", "sleep", "records", "score", "train", "checkpoint", "publish", "metrics",
    "outages",
)  # fmt: skip


class Halves(GroupSource):
    """Samples two groups a step: one whose rewards differ, one whose rewards are equal and which is scored only."""

    groups_per_step = 2

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine

    async def sample(self, number: int) -> TrajectoryGroup:
        params = SamplingParams(max_tokens=4, seed=number)
        request = SampleRequest(request_id=str(number), prompt_ids=token_ids(PROMPT), params=params, n=4)
        sequences = (await self.engine.sample(request)).sequences
        rewards = [float(number % 2 and place < 2) for place in range(4)]
        return group(*[trajectory(r, prompt=PROMPT, completion=s) for r, s in zip(rewards, sequences, strict=True)])


async def run(directory, *, num_steps: int, max_staleness: int = 0) -> tuple[list[dict], list[float]]:
    """Train, and return what was logged, and the time on the clock when each step's metrics were complete."""
    ended_s = []

    async def pause(*_) -> None:
        await asyncio.sleep(PAUSE_S)

    observer = Callbacks(
        before_update=None if max_staleness else pause,
        on_rollouts=pause,
        on_step=lambda step, metrics: ended_s.append(time.perf_counter()),
        after_step=pause,
    )
    engine = TransformersEngine(tiny_qwen3())
    with MetricsWriter(directory) as metrics:
        await train(
            Halves(engine),
            trainer=Trainer(tiny_qwen3(), TrainerConfig()),
            publisher=InProcessPublisher(engine),
            metrics=metrics,
            checkpoints=Checkpoints(directory / "checkpoints", every=1),
            config=LoopConfig(num_steps=num_steps, max_staleness=max_staleness),
            observer=observer,
        )
    await engine.close()
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()], ended_s


async def test_the_parts_of_a_step_add_up_to_the_wall_clock(tmp_path):
    logged, ended_s = await run(tmp_path, num_steps=6)
    for line in logged:
        parts = [line[f"seconds/{name}"] for name in PARTS]
        assert sum(parts) + line["seconds/other"] == pytest.approx(line["seconds/wall"])
        assert min(parts) >= 0
    whole_s = sum(line["seconds/wall"] for line in logged[1:])
    # On a quiet machine both are within 2 %; other work on it may stop this process between two readings of the clock.
    assert whole_s == pytest.approx(ended_s[-1] - ended_s[0], rel=0.2)
    assert 0 <= sum(line["seconds/other"] for line in logged[1:]) < 0.2 * whole_s


async def test_each_part_of_a_step_has_its_own_seconds(tmp_path):
    logged, _ = await run(tmp_path, num_steps=3)
    for line in logged[1:]:
        assert line["seconds/sleep"] >= PAUSE_S
        assert line["seconds/records"] >= PAUSE_S
        assert line["seconds/after_step"] >= PAUSE_S
        assert all(line[f"seconds/{name}"] > 0 for name in ("log", "units", "score", "metrics", "checkpoint"))
        between_s = line["seconds/log"] + line["seconds/after_step"]
        assert line["seconds/step"] == pytest.approx(line["seconds/wall"] - between_s, abs=PAUSE_S)
    assert logged[0]["seconds/log"] == logged[0]["seconds/after_step"] == 0


async def test_the_step_that_a_run_continues_after_has_no_seconds_of_another_process(tmp_path):
    await run(tmp_path, num_steps=2)
    logged, _ = await run(tmp_path, num_steps=3)
    assert [line["step"] for line in logged] == [0, 1, 2]
    assert logged[1].keys() == logged[2].keys()
    assert logged[1]["seconds/wall"] is logged[1]["seconds/other"] is logged[1]["seconds/sleep"] is None
    assert logged[2]["seconds/other"] < 0.5 * logged[2]["seconds/wall"]


async def test_with_staleness_there_is_a_wall_clock_and_no_rest(tmp_path):
    logged, ended_s = await run(tmp_path, num_steps=4, max_staleness=1)
    assert {line["seconds/other"] for line in logged} == {None}
    whole_s = sum(line["seconds/wall"] for line in logged[1:])
    assert whole_s == pytest.approx(ended_s[-1] - ended_s[0], rel=0.2)
