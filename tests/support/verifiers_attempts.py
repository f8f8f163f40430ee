"""Attempts of environments of verifiers, through a gateway over a scripted engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.gateways import running_gateway, scripted
from unbroken.client import AsyncClient
from unbroken.gateway.hosting import hosted
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.collector import Sampler
from unbroken.runs.config import RolloutConfig
from unbroken.runs.prompts.packages import PackageProblems, PackageSettings


def load(reference: str, *, seed: int = 0, **arguments: Any) -> PackageProblems:
    """The problems of an environment with these arguments."""
    return PackageProblems(reference, PackageSettings(arguments=arguments), seed=seed)


async def sample(
    folder: Path, *replies: str, name: str, size: int = 1, **arguments: Any
) -> tuple[TrajectoryGroup, Any]:
    """A group of problem 0 of `verifiers:NAME`, and the engine that was asked."""
    problems = load(f"verifiers:{name}", **arguments).make(evaluation=True)
    engine: Any = scripted(*replies)
    renderer: Any = None
    async with (
        running_gateway(engine, folder / "store") as gateway,
        hosted(gateway.app) as url,
        AsyncClient(url) as client,
    ):
        sampler = Sampler(
            engine=engine,
            renderer=renderer,
            config=RolloutConfig(),
            problems=problems,
            seed=(0,),
            sessions=client.sessions,
        )
        return await sampler.sample_group(0, size=size), engine
