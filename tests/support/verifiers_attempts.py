"""Attempts of environments of verifiers, through a gateway over a scripted engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.attempts import sample_attempts
from support.gateways import scripted
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.prompts.environments import PackageProblems, PackageSettings


def load(reference: str, *, seed: int = 0, **arguments: Any) -> PackageProblems:
    """The problems of an environment with these arguments."""
    return PackageProblems(reference, PackageSettings(arguments=arguments, logs=Path("agents")), seed=seed)


async def sample(
    folder: Path, *replies: str, name: str, size: int = 1, **arguments: Any
) -> tuple[TrajectoryGroup, Any]:
    """A group of problem 0 of `verifiers:NAME`, and the engine that was asked."""
    problems = load(f"verifiers:{name}", **arguments).make(evaluation=True)
    engine: Any = scripted(*replies)
    return await sample_attempts(folder, engine, problems, size=size), engine
