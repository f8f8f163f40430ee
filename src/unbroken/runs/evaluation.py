"""The mean reward on a fixed set of problems, before the first step and after the last, in `evaluation.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from accelerate.utils import gather_object

from unbroken.errors import EngineError, MetricsError, OutageError, RolloutError
from unbroken.rollout.failures import format_error
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.runs.collector import Sampler
from unbroken.runs.processes import Rank
from unbroken.training.model.sharding import fail_together

_FILE = "evaluation.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation of a policy."""

    mean_reward: float
    trajectories: tuple[Trajectory, ...] = ()
    """This process's rollouts, in the order of their problems; empty where the number was read from the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Rolls out each problem once, with the same seeds in every evaluation, so that only the policy differs."""

    sampler: Sampler
    num_problems: int
    output: Path
    rank: Rank

    async def evaluate(self, step: int) -> Evaluation | None:
        """Evaluate the policy after `step` steps, or read the number from the file if it is there.

        A rollout without a reward (a time-out, a failure) counts as 0, except if no reward function has an opinion on
        it. Returns None without problems, and at step 0 if the engine has newer weights.

        Raises:
            OutageError: the engine went away, and nothing was measured.
            RolloutError: every rollout failed.
            MetricsError: the file cannot be written.
        """
        if self.num_problems == 0:
            return None
        lines = read_evaluations(self.output)
        for line in lines:
            if (line["step"], line["num_rollouts"]) == (step, self.num_problems):
                return Evaluation(mean_reward=line["reward/mean"])
        if step == 0 and self.sampler.engine.policy_version > 0:
            return None
        numbers = self.rank.select(range(self.num_problems))
        with fail_together():
            groups = await self.sampler.sample_groups(numbers, size=1)
        trajectories = tuple(trajectory for group in groups for trajectory in group.trajectories)
        new = {"step": step, **_summarize(trajectories)}
        with fail_together():
            if self.rank.index == 0:
                _write(self.output / _FILE, [*lines, new])
        return Evaluation(mean_reward=new["reward/mean"], trajectories=trajectories)


def read_evaluations(output: Path) -> list[dict[str, float]]:
    """The evaluations of a run so far: `step`, `num_rollouts`, `num_without_reward`, `reward/mean`."""
    path = output / _FILE
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _write(path: Path, lines: Sequence[Mapping[str, float]]) -> None:
    """Write all lines or none: a run cannot continue from a line that a full disk cut short."""
    part = path.with_name(f"{_FILE}.part")
    try:
        part.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        part.replace(path)
    except OSError as error:
        raise MetricsError(f"the evaluation cannot be written: {error}. Make room and start the run again") from error


def _summarize(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The numbers over all processes; an error in one process is raised in all."""
    rollouts: list[tuple[float | None, TrajectoryStatus, bool, str | None]] = gather_object(
        [
            (
                each.reward,
                each.status,
                isinstance(each.error, EngineError),
                None if each.error is None else format_error(each.error),
            )
            for each in trajectories
        ]
    )
    lost = next((message for _, _, is_lost, message in rollouts if is_lost), None)
    if lost is not None:
        raise OutageError(f"the evaluation lost its engine ({lost}): start the run again once the engine is back")
    failed = [message for *_, message in rollouts if message is not None]
    if len(failed) == len(rollouts):
        raise RolloutError(f"all {len(failed)} rollouts of the evaluation failed, the first with {failed[0]}")
    counted = [reward or 0.0 for reward, status, _, _ in rollouts if status is not TrajectoryStatus.UNSCORED]
    return {
        "num_rollouts": len(rollouts),
        "num_without_reward": sum(reward is None for reward, *_ in rollouts),
        "reward/mean": float(np.mean(counted)) if counted else 0.0,
    }
