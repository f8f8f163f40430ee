"""Rollouts against a scripted engine, and helpers for their tests."""

from __future__ import annotations

from support.fake_renderer import END, FakeRenderer, encode
from unbroken.engines.scripted import ScriptedEngine
from unbroken.rendering.base import Renderer
from unbroken.rollout.env import Continue, Env
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.trajectory import Trajectory
from unbroken.types import SamplingParams

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
