"""The mean reward on a fixed set of problems, at named steps, in a file that each step stands in once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from accelerate.utils import gather_object

from unbroken.errors import OutageError, ServerBehindError, ServerUnreachableError
from unbroken.recipes.collector import Sampler, Share
from unbroken.rollout.trajectory import Trajectory

_FILE = "evaluation.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Rolls out each problem once, with the seeds it had the last time: what differs is the policy."""

    sampler: Sampler
    num_problems: int
    output: Path
    share: Share

    async def at(self, step: int) -> float | None:
        """The mean reward of the policy after `step` steps: measured once, then read from the file.

        A rollout that has no reward (a time-out, a failure) counts as 0. None where there are no problems.

        Raises:
            OutageError: the engine went away, and nothing was measured.
        """
        if self.num_problems == 0:
            return None
        known = {line["step"]: line["reward/mean"] for line in read_evaluations(self.output)}
        if step in known:
            return float(known[step])
        mine = self.share.of(range(self.num_problems))
        groups = await self.sampler.groups(mine, size=1)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        _check_none_lost(trajectories)
        line = {"step": step, **_summary(trajectories)}
        if self.share.index == 0:
            with (self.output / _FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return line["reward/mean"]


def read_evaluations(output: Path) -> list[dict[str, float]]:
    """What was measured in a run so far: `step`, `num_rollouts`, `num_without_reward`, `reward/mean`."""
    path = output / _FILE
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _check_none_lost(trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        if isinstance(trajectory.error, ServerUnreachableError | ServerBehindError):
            raise OutageError(
                f"the evaluation lost its engine ({trajectory.error}): start the run again once the engine is there"
            ) from trajectory.error


def _summary(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The numbers over all processes."""
    rewards: list[float | None] = gather_object([trajectory.reward for trajectory in trajectories])
    return {
        "num_rollouts": len(rewards),
        "num_without_reward": rewards.count(None),
        "reward/mean": float(np.mean([reward or 0.0 for reward in rewards])),
    }
