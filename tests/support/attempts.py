"""Attempts of agents, through a gateway over an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.gateways import running_gateway
from unbroken.client import AsyncClient
from unbroken.engines.base import Engine
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.collector import Problems, Sampler
from unbroken.runs.config import RolloutConfig
from unbroken.server.process import host_app


async def sample_attempts(
    folder: Path, engine: Engine, problems: Problems, config: RolloutConfig | None = None, *, size: int
) -> TrajectoryGroup:
    """A group of problem 0. Sessions are stored in `folder`."""
    renderer: Any = None
    async with (
        running_gateway(engine, folder / "store") as gateway,
        host_app(gateway.app) as url,
        AsyncClient(url) as client,
    ):
        sampler = Sampler(
            engine=engine,
            renderer=renderer,
            config=config or RolloutConfig(),
            problems=problems,
            seed=(0,),
            sessions=client.sessions,
        )
        return await sampler.sample_group(0, size=size)
