"""Rollouts against a scripted engine, and helpers for their tests."""

from __future__ import annotations

import asyncio

import numpy as np

from support.fake_renderer import END, FakeRenderer, encode
from unbroken.engines.base import Engine
from unbroken.engines.scripted import ScriptedEngine
from unbroken.rendering.base import Renderer
from unbroken.rollout.env import Continue, Env
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.trajectory import Trajectory
from unbroken.types import SamplingParams, TrainingSample

MORE = Continue(messages=[{"role": "user", "content": "more"}])
HELLO = [*encode("hello"), END]


async def play(
    env: Env,
    engine: ScriptedEngine,
    *,
    renderer: Renderer | None = None,
    sampling: SamplingParams | None = None,
    limits: Limits | None = None,
) -> Trajectory:
    return await run_rollout(
        env,
        engine=engine,
        renderer=renderer or FakeRenderer(),
        sampling=sampling or SamplingParams(max_tokens=50),
        limits=limits or Limits(),
        trajectory_id="t",
    )


async def expect_free(engine: ScriptedEngine, request_id: str) -> None:
    """An engine refuses a request id that is still in use."""
    await engine.resume()
    assert engine.requests[-1].request_id == request_id
    await engine.sample(engine.requests[-1])


async def play_turns(
    engine: Engine, params: SamplingParams, *, seed: int = 0, longest_given: int = 0, num_agents: int = 9
) -> list[TrainingSample]:
    """Rows of three turns that agents of many speeds sample at once, so that batches, and what is cached, differ; the
    first begins with `longest_given` ids.
    """
    from unbroken.runs.numerics import sample_row  # it loads torch, which most of our users do not need

    rng = np.random.default_rng(seed)
    turns = [
        [(int(rng.geometric(0.06)), int(rng.integers(1, params.max_tokens))) for _ in range(3)]
        for _ in range(num_agents)
    ]
    if longest_given:
        turns[0][0] = (longest_given, turns[0][0][1])
    rows = (sample_row(engine, params, (seed, number), own, 0.01) for number, own in enumerate(turns))
    return await asyncio.gather(*rows)
