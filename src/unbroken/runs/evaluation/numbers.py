"""The numbers of one evaluation: mean reward, its standard error, and pass@k.

Worked example, 2 problems with 4 samples each, and rewards of 1 for success:

    problem 0    1 0 0 0    mean 1/4    1 of 4 passes
    problem 1    1 1 0 0    mean 2/4    2 of 4 pass

    reward/mean              3/8
    reward/standard_error    std(1/4, 2/4) / sqrt(2) = 1/8
    pass@1                   (1/4 + 2/4) / 2 = 3/8
    pass@2                   ((1 - C(3, 2) / C(4, 2)) + (1 - C(2, 2) / C(4, 2))) / 2 = (1/2 + 5/6) / 2 = 2/3
    pass@4                   1
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the numbers need of one rollout."""

    reward: float | None
    is_scored: bool
    """False if no reward function has an opinion on it: it counts nowhere."""
    num_sampled: int
    """Ids sampled in all turns."""
    was_cut: bool
    """Whether its length, its turns or its time came to their limit."""
    versions: tuple[int, ...] = ()
    """Policy versions that sampled its ids, each once."""

    @staticmethod
    def of(trajectory: Trajectory) -> Sample:
        """The sample of a rollout."""
        return Sample(
            reward=trajectory.reward,
            is_scored=trajectory.status is not TrajectoryStatus.UNSCORED,
            num_sampled=trajectory.num_sampled,
            was_cut=trajectory.status in _CUT,
            versions=trajectory.tree.sampled_versions,
        )


_CUT = frozenset(
    {
        TrajectoryStatus.TRUNCATED,
        TrajectoryStatus.MAX_TURNS,
        TrajectoryStatus.MAX_TOKENS,
        TrajectoryStatus.TIMEOUT,
    }
)


def summarize(problems: Sequence[Sequence[Sample]], *, pass_reward: float) -> dict[str, float | None]:
    """The numbers of the samples of each problem.

    A rollout without a reward (a time-out, a failure) counts as 0, unless it is unscored. The standard error is that of
    the mean over problems, whose samples are not independent (Miller 2024, arXiv:2411.00640); None for one problem.
    pass@k is the unbiased estimate of Chen et al. 2021 (arXiv:2107.03374) for k = 1, 2, 4, ... and all samples.
    """
    samples = [sample for of_problem in problems for sample in of_problem]
    rewards = [[each.reward or 0.0 for each in of_problem if each.is_scored] for of_problem in problems]
    scored = [of_problem for of_problem in rewards if of_problem]
    means = [float(np.mean(of_problem)) for of_problem in scored]
    numbers: dict[str, float | None] = {
        "num_problems": len(problems),
        "num_rollouts": len(samples),
        "num_without_reward": sum(each.reward is None for each in samples),
        "num_cut": sum(each.was_cut for each in samples),
        "reward/mean": float(np.mean([reward for of_problem in scored for reward in of_problem])) if scored else 0.0,
        "reward/standard_error": float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None,
    }
    for k in _choose_ks(max(map(len, scored), default=0)):
        chances = [
            pass_at_k(len(of_problem), sum(reward >= pass_reward for reward in of_problem), k)
            for of_problem in scored
            if len(of_problem) >= k
        ]
        numbers[f"pass@{k}"] = float(np.mean(chances))
    versions = [version for sample in samples for version in sample.versions]
    numbers["policy_version/min"], numbers["policy_version/max"] = (
        (min(versions), max(versions)) if versions else (None, None)
    )
    numbers["completion_tokens/mean"] = float(np.mean([each.num_sampled for each in samples])) if samples else None
    return numbers


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The chance that at least one of k samples passes, drawn without replacement from those that were made."""
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def tracked_name(set_name: str, number: str, *, default: str) -> str:
    """The name of a number in trackers, and some refuse @: `evaluation/reward_mean`, `evaluation/math/pass_at_4`."""
    prefix = "evaluation" if set_name == default else f"evaluation/{set_name}"
    return f"{prefix}/{number.replace('/', '_').replace('@', '_at_')}"


def tracked(line: Mapping[str, object], *, set_name: str, default: str) -> dict[str, float]:
    """The numbers of an evaluation as trackers show them."""
    return {
        tracked_name(set_name, name, default=default): float(value)
        for name, value in line.items()
        if isinstance(value, (int, float)) and name != "step"
    }


def _choose_ks(num_samples: int) -> list[int]:
    powers = [2**n for n in range(num_samples.bit_length()) if 2**n <= num_samples]
    return sorted({*powers, num_samples} - {0})
