"""The mean reward on a fixed set of problems, at named steps, in a file that each stands in once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from accelerate.utils import gather_object

from unbroken.errors import EngineError, MetricsError, OutageError, RolloutError
from unbroken.runs.collector import Sampler, Share
from unbroken.rollout.failures import format_error
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

        A rollout that has no reward (a time-out, a failure) counts as 0. None where there are no problems, and before
        the first step if the engine has newer weights.

        Raises:
            OutageError: the engine went away, and nothing was measured.
            RolloutError: every rollout failed.
            MetricsError: the disk does not take the number.
        """
        if self.num_problems == 0:
            return None
        lines = read_evaluations(self.output)
        for line in lines:
            if (line["step"], line["num_rollouts"]) == (step, self.num_problems):
                return line["reward/mean"]
        if step == 0 and self.sampler.engine.policy_version > 0:
            return None
        mine = self.share.of(range(self.num_problems))
        groups = await self.sampler.groups(mine, size=1)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        new = {"step": step, **_summary(trajectories)}
        if self.share.index == 0:
            _write(self.output / _FILE, [*lines, new])
        return new["reward/mean"]


def read_evaluations(output: Path) -> list[dict[str, float]]:
    """What was measured in a run so far: `step`, `num_rollouts`, `num_without_reward`, `reward/mean`."""
    path = output / _FILE
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _write(path: Path, lines: Sequence[Mapping[str, float]]) -> None:
    """All of them or none: a line that a full disk cut short could not be read when the run goes on."""
    aside = path.with_name(f"{_FILE}.part")
    try:
        aside.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        aside.replace(path)
    except OSError as error:
        raise MetricsError(f"the evaluation cannot be written: {error}. Make room and start the run again") from error


def _summary(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The numbers over all processes; what keeps one from its own is raised on all."""
    seen: list[tuple[float | None, bool, str | None]] = gather_object(
        [
            (each.reward, isinstance(each.error, EngineError), None if each.error is None else format_error(each.error))
            for each in trajectories
        ]
    )
    lost = next((told for _, is_lost, told in seen if is_lost), None)
    if lost is not None:
        raise OutageError(f"the evaluation lost its engine ({lost}): start the run again once the engine is there")
    failed = [told for _, _, told in seen if told is not None]
    if len(failed) == len(seen):
        raise RolloutError(f"all {len(failed)} rollouts of the evaluation failed, the first with {failed[0]}")
    rewards = [reward for reward, _, _ in seen]
    return {
        "num_rollouts": len(rewards),
        "num_without_reward": rewards.count(None),
        "reward/mean": float(np.mean([reward or 0.0 for reward in rewards])),
    }
