"""Rollouts against a scripted engine, and helpers for their tests."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from support.fake_renderer import END, FakeRenderer, encode
from unbroken.engines.base import Engine
from unbroken.engines.scripted import ScriptedEngine
from unbroken.ledger.export import export_samples
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree
from unbroken.rendering.base import Renderer
from unbroken.rollout.env import Continue, Env
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.trajectory import Trajectory
from unbroken.types import SampleRequest, SamplingParams, TrainingSample, token_ids

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

    async def play_one(number: int) -> TrainingSample:
        rng = np.random.default_rng([seed, number])
        tree, end, ids = TokenTree(), None, token_ids([])
        for turn in range(3):
            await asyncio.sleep(float(rng.exponential(0.01)))
            num_given = int(rng.geometric(0.06))
            if longest_given and number == turn == 0:
                num_given = longest_given
            given = token_ids(rng.integers(0, engine.vocab_size, num_given))
            ids = token_ids([*ids, *given])
            own = replace(params, seed=int(rng.integers(2**31)), max_tokens=int(rng.integers(1, params.max_tokens)))
            name = f"{seed}/{number}/{turn}"
            (sequence,) = (await engine.sample(SampleRequest(request_id=name, prompt_ids=ids, params=own))).sequences
            origin = Origin.BRIDGE if turn else Origin.PROMPT
            end = tree.add_sampled(sequence, parent=tree.add_given(given, origin, parent=end))
            ids = token_ids([*ids, *sequence.completion_ids])
        (row,) = export_samples(tree, float(rng.normal()))
        return row

    return await asyncio.gather(*map(play_one, range(num_agents)))
