"""The engine in the trainer's process: it sleeps through every step, and wakes with what was trained."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import torch

from support.architectures import tiny_model
from support.loops import Callbacks
from support.rows import group, trajectory
from support.steps import train
from unbroken.engines.base import SleepingEngine
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import EngineError, TrainingError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.groups import GroupSource
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.trainer import Trainer
from unbroken.types import SampleRequest, SamplingParams, token_ids
from unbroken.weights.base import InProcessPublisher, WeightUpdate
from unbroken.weights.sources import TensorSource

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT_IDS = token_ids([1, 2, 3, 4, 5])
DROPPED_STEP = 1


class Run(GroupSource):
    """A bandit: the reward is the share of ids below 32. In one step all rewards are equal, and it is dropped."""

    groups_per_step = 1

    def __init__(self, engine: SleepingEngine, model: Any, *, learning_rate: float = 3e-3) -> None:
        self.engine = engine
        config = TrainerConfig(optimizer=OptimizerConfig(learning_rate=learning_rate))
        self.trainer = Trainer(model, config, policy_version=engine.policy_version)
        self.expected = {engine.policy_version: scores_of(model)}
        """Of `PROMPT_IDS`, by the version of the weights."""
        self.num_steps = 0
        self.num_slept = 0

    async def sample(self, number: int) -> TrajectoryGroup:
        params = SamplingParams(max_tokens=6, seed=self.num_steps)
        request = SampleRequest(request_id=str(self.num_steps), prompt_ids=PROMPT_IDS, params=params, n=16)
        sequences = (await self.engine.sample(request)).sequences
        rewards = [float((sequence.completion_ids < 32).mean()) for sequence in sequences]
        if self.num_steps == DROPPED_STEP:
            rewards = [0.5] * len(rewards)
        self.num_steps += 1
        members = [trajectory(r, prompt=PROMPT_IDS, completion=s) for r, s in zip(rewards, sequences, strict=True)]
        return group(*members)

    async def publish(self, named_parameters: Any, *, policy_version: int) -> WeightUpdate:
        weights = list(named_parameters)
        self.expected[policy_version] = scores_of(self.trainer.backend.policy.model)
        return await InProcessPublisher(self.engine).publish(weights, policy_version=policy_version)

    async def sleep(self) -> None:
        await self.engine.sleep()
        self.num_slept += 1

    async def train(
        self, folder: Any, *, before_update: Callable[[], Awaitable[None]] | None = None, num_steps: int = 4
    ) -> list[Any]:
        with MetricsWriter(folder) as metrics:
            await train(
                self,
                trainer=self.trainer,
                publisher=self,
                metrics=metrics,
                config=LoopConfig(num_steps=num_steps),
                observer=Callbacks(before_update=before_update or self.sleep),
            )
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scores_of(model: Any) -> np.ndarray:
    with torch.no_grad():
        logprobs_TV = torch.log_softmax(model(torch.tensor([PROMPT_IDS.tolist()])).logits[0, :-1].float(), -1)
    return logprobs_TV.gather(1, torch.tensor(PROMPT_IDS[1:].tolist())[:, None])[:, 0].numpy()


async def watch(run: Run, answered: set[int], refusals: list[str]) -> None:
    """Ask on and on: an answer must be that of the weights of its version, which is known before they are used."""
    while True:
        before = run.engine.policy_version
        try:
            found = (await run.engine.score(PROMPT_IDS)).logprobs
        except EngineError as error:
            refusals.append(str(error))
        else:
            versions = range(before, run.engine.policy_version + 1)
            near = [v for v in versions if np.abs(run.expected[v] - found).max() < 1e-4]
            assert near, (found, {v: run.expected[v] for v in versions})
            answered.add(near[0])
        await asyncio.sleep(0.001)


async def watched(run: Run, work: Coroutine[Any, Any, Any]) -> tuple[Any, set[int], list[str]]:
    answered: set[int] = set()
    refusals: list[str] = []
    watcher = asyncio.create_task(watch(run, answered, refusals))
    try:
        done = await work
        await asyncio.sleep(0.1)
    finally:
        watcher.cancel()
        (ended,) = await asyncio.gather(watcher, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError), ended
    return done, answered, refusals


async def check_a_run(run: Run, folder: Any, before_update: Callable[[], Awaitable[None]] | None = None) -> None:
    first = run.engine.policy_version
    lines, answered, refusals = await watched(run, run.train(folder, before_update=before_update))
    assert [bool(line["train/num_rows"]) for line in lines] == [True, False, True, True]
    assert run.num_slept == 3
    assert run.engine.policy_version == first + 3
    assert max(line["mismatch/max_abs"] for line in lines if line["train/num_rows"]) < 1e-4
    assert answered >= {first, first + 3}
    assert refusals
    assert all("sleeps" in refusal for refusal in refusals)
    spread = [np.abs(run.expected[v] - run.expected[v + 1]).max() for v in range(first, first + 3)]
    assert min(spread) > 1e-3  # or the versions would not differ
    fresh = TransformersEngine(copy.deepcopy(run.trainer.backend.policy.model))
    params = SamplingParams(max_tokens=20, temperature=0.0)
    request = SampleRequest(request_id="greedy", prompt_ids=PROMPT_IDS, params=params)
    ours, theirs = [(await engine.sample(request)).sequences[0] for engine in (run.engine, fresh)]
    await fresh.close()
    assert ours.completion_ids.tolist() == theirs.completion_ids.tolist()
    assert set(ours.policy_versions.tolist()) == {first + 3}


async def test_i6_the_embedded_engine_sleeps_through_each_step_and_wakes_with_its_weights(tmp_path: Any) -> None:
    engine = TransformersEngine(tiny_model())
    await check_a_run(Run(engine, tiny_model()), tmp_path)
    await engine.close()


async def test_i6_vllm_sleeps_through_each_step_and_wakes_with_its_weights_though_it_lost_all(
    tmp_path: Any, shared_vllm: Any
) -> None:
    from support.vllm_engines import tiny_vllm_model

    engine = shared_vllm.engine
    model = tiny_vllm_model(11)
    await engine.update_weights(TensorSource(model.named_parameters()), policy_version=engine.policy_version + 1)
    run = Run(engine, model)

    async def sleep_and_lose_all() -> None:
        """As on a GPU, where a sleep drops the weights."""
        await run.sleep()
        await engine._llm.collective_rpc("reset_weights")

    await check_a_run(run, tmp_path, sleep_and_lose_all)


async def test_an_engine_stays_asleep_after_a_step_that_failed(tmp_path: Any) -> None:
    engine = TransformersEngine(tiny_model())
    run = Run(engine, tiny_model(), learning_rate=1e30)
    with pytest.raises(TrainingError):
        await run.train(tmp_path)
    with pytest.raises(EngineError, match="sleeps"):
        await engine.score(PROMPT_IDS)
    await engine.close()
