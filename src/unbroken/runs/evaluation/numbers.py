"""The numbers of an evaluation, and how certain they are.

A problem's samples are not independent, so problems are what the bootstrap draws:

    2 problems with 4 samples each      0 1 1 0 and 1 1 1 1      reward/mean (2 + 4) / (4 + 4)
    a draw of 2 problems                the second one twice     (4 + 4) / (4 + 4)

Two models have the same problems and seeds, so their difference is that of each problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import EngineError
from unbroken.rollout.failures import format_error, format_frames
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.runs.records.files import summarize as summarize_record

INTERVALS = (
    "95 %: bootstrap over problems (10,000 draws); Wilson for pass@k where each problem's is 0 or 1; none for one "
    "problem, or where all problems have one value; too narrow for fewer than about 20 problems"
)
_NUM_DRAWS, _NUM_TOGETHER = 10_000, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the numbers need of one rollout."""

    reward: float | None
    status: TrajectoryStatus
    num_sampled: int
    """Ids sampled in all turns."""
    versions: tuple[int, ...] = ()
    """Policy versions that sampled its ids, at least the first and the last."""
    num_turns: int = 1
    wall_time_s: float = 0.0
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    error: str | None = None
    has_lost_engine: bool = False

    @property
    def is_scored(self) -> bool:
        """False if no reward function has an opinion on it: it counts nowhere."""
        return self.status is not TrajectoryStatus.UNSCORED

    @property
    def was_cut(self) -> bool:
        """Whether its length, its turns or its time came to their limit."""
        return self.status in _CUT

    def passes(self, pass_reward: float) -> bool:
        """Whether it has a reward of at least this: a failed rollout has none, and passes no bound, however low."""
        return self.reward is not None and self.reward >= pass_reward

    @staticmethod
    def of(trajectory: Trajectory) -> Sample:
        """The sample of a rollout."""
        error = trajectory.error
        return Sample(
            reward=trajectory.reward,
            status=trajectory.status,
            num_sampled=trajectory.num_sampled,
            versions=trajectory.tree.sampled_versions,
            num_turns=len(trajectory.turns),
            wall_time_s=trajectory.wall_time_s,
            reward_parts=dict(trajectory.reward_parts),
            error=None if error is None else format_error(error) + format_frames(error),
            has_lost_engine=isinstance(error, EngineError),
        )

    @staticmethod
    def read(record: Mapping[str, Any]) -> Sample:
        """The sample of a rollout's record."""
        found = summarize_record(record)
        names = ("reward", "num_sampled", "num_turns", "wall_time_s")
        return Sample(
            status=TrajectoryStatus(record["status"]),
            error=record["error"],
            versions=tuple(found["versions"] or ()),
            **{name: found[name] for name in names},
            reward_parts=record.get("reward_parts") or {},
        )


_CUT = frozenset(
    {TrajectoryStatus.TRUNCATED, TrajectoryStatus.MAX_TURNS, TrajectoryStatus.MAX_TOKENS, TrajectoryStatus.TIMEOUT}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A number of an evaluation: the sum over the problems divided by their count."""

    sums: NDArray[np.float64]
    """[P] of each problem's samples."""
    counts: NDArray[np.float64]
    """[P] how many samples of each problem count."""
    is_pass: bool = False

    @classmethod
    def of(cls, values: Sequence[Sequence[float]], *, is_pass: bool = False) -> Measure:
        """Make it of the values of each problem's samples."""
        sums, counts = ([count(each) for each in values] for count in (math.fsum, len))
        return cls(sums=np.array(sums, np.float64), counts=np.array(counts, np.float64), is_pass=is_pass)

    @property
    def value(self) -> float | None:
        """The number; None if nothing counts."""
        return float(self.sums.sum() / self.counts.sum()) if self.counts.any() else None

    def find_interval(self) -> tuple[float, float] | None:
        """The interval; None if there is none (`INTERVALS`)."""
        sums, counts = self.sums[self.counts > 0], self.counts[self.counts > 0]
        means, number = sums / counts, len(sums)
        if self.is_pass and number > 0 and np.isin(means, (0.0, 1.0)).all():
            return _wilson(float(means.mean()), number)
        if number < 2 or (means == means[0]).all():
            return None
        rng = np.random.default_rng(0)  # always the same draws
        draws = [rng.integers(number, size=(_NUM_TOGETHER, number)) for _ in range(_NUM_DRAWS // _NUM_TOGETHER)]
        drawn = np.concatenate([sums[each].sum(axis=1) / counts[each].sum(axis=1) for each in draws])
        low, high = np.quantile(drawn, (0.025, 0.975))
        return float(low), float(high)

    def to_json(self) -> dict[str, Any]:
        """The number and its interval."""
        low, high = self.find_interval() or (None, None)
        return {"value": self.value, "low": low, "high": high, "num_problems": int((self.counts > 0).sum())}


def _wilson(share: float, num: int, z: float = 1.959964) -> tuple[float, float]:
    middle = (share + z * z / (2 * num)) / (1 + z * z / num)
    half = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num)) / (1 + z * z / num)
    return max(middle - half, 0.0), min(middle + half, 1.0)


_OF_ROLLOUTS: dict[str, Callable[[Sample], float]] = {
    "completion_tokens/mean": lambda each: each.num_sampled,
    "turns/mean": lambda each: each.num_turns,
    "seconds/mean": lambda each: each.wall_time_s,
    "cut/share": lambda each: each.was_cut,
    "failed/share": lambda each: each.status in (TrajectoryStatus.FAILED, TrajectoryStatus.ABORTED),
}
"""Numbers that each rollout has. Seconds are from its start to its reward, while others are sampled."""


def measure(problems: Sequence[Sequence[Sample]], *, pass_reward: float) -> dict[str, Measure]:
    """The numbers of an evaluation, by the names of `evaluation.jsonl`.

    Worked example, 2 problems with 4 samples each, and rewards of 1 for success:

        problem 0    1 0 0 0    mean 1/4    1 of 4 passes
        problem 1    1 1 0 0    mean 2/4    2 of 4 pass

        reward/mean              3/8
        pass@1                   (1/4 + 2/4) / 2 = 3/8
        pass@2                   ((1 - C(3, 2) / C(4, 2)) + (1 - C(2, 2) / C(4, 2))) / 2 = (1/2 + 5/6) / 2 = 2/3
        pass@4                   1

    A rollout without a reward (a time-out, a failure) counts as 0 in the mean and never passes, unless it is unscored.
    `reward_parts/NAME` is over the rollouts that have this part.
    pass@k is the unbiased estimate of Chen et al. 2021 (arXiv:2107.03374) for k = 1, 2, 4, ... and all samples.
    """
    scored = [[each for each in samples if each.is_scored] for samples in problems]
    of_rollouts = {
        name: Measure.of([[float(read(each)) for each in samples] for samples in problems])
        for name, read in _OF_ROLLOUTS.items()
    }
    return {"reward/mean": Measure.of(_list_rewards(scored)), **_measure_parts(scored),
            **_measure_passes(scored, pass_reward), **of_rollouts}  # fmt: skip


def _list_rewards(problems: Sequence[Sequence[Sample]]) -> list[list[float]]:
    return [[0.0 if each.reward is None else each.reward for each in samples] for samples in problems]


def _measure_parts(problems: Sequence[Sequence[Sample]]) -> dict[str, Measure]:
    """The numbers of each reward function, in the order in which they come."""
    found: dict[str, Measure] = {}
    for name in dict.fromkeys(name for samples in problems for each in samples for name in each.reward_parts):
        parts = [
            [part for each in samples if (part := each.reward_parts.get(name)) is not None] for samples in problems
        ]
        found[f"reward_parts/{name}"] = Measure.of(parts)
    return found


def _measure_passes(problems: Sequence[Sequence[Sample]], pass_reward: float) -> dict[str, Measure]:
    """pass@k; a problem with fewer than k samples, as where some are unscored, has none."""
    passed = [(len(samples), sum(each.passes(pass_reward) for each in samples)) for samples in problems]
    found: dict[str, Measure] = {}
    for k in _choose_ks(max((number for number, _ in passed), default=0)):
        chances = [[_pass_at_k(number, num, k)] if number >= k else [] for number, num in passed]
        found[f"pass@{k}"] = Measure.of(chances, is_pass=True)
    return found


def compare(baseline: Mapping[str, Measure], other: Mapping[str, Measure]) -> dict[str, Any]:
    """The mean difference from the baseline over the problems that both have."""
    found = {}
    for name in [name for name in baseline if name in other]:
        first, second = baseline[name], other[name]
        both = (first.counts > 0) & (second.counts > 0)
        change = second.sums[both] / second.counts[both] - first.sums[both] / first.counts[both]
        found[name] = Measure(sums=change, counts=np.ones(len(change))).to_json()
    return found


def summarize(problems: Sequence[Sequence[Sample]], *, pass_reward: float) -> dict[str, float | None]:
    """The line of an evaluation in `evaluation.jsonl`: counts, and numbers of `measure` as they are.

    The standard error is that of the mean over problems, whose samples are not independent (Miller 2024,
    arXiv:2411.00640): std(1/4, 2/4) / sqrt(2) = 1/8 in the example of `measure`. None for one problem.
    """
    samples = [sample for of_problem in problems for sample in of_problem]
    measures = measure(problems, pass_reward=pass_reward)
    versions = [version for sample in samples for version in sample.versions]
    mean = measures["reward/mean"].value
    return {
        "num_problems": len(problems),
        "num_rollouts": len(samples),
        "num_without_reward": sum(each.reward is None for each in samples),
        "num_cut": sum(each.was_cut for each in samples),
        # The best model and the curves need a number, also where no reward function has an opinion on anything.
        "reward/mean": 0.0 if mean is None else mean,
        "reward/standard_error": _find_standard_error(measures["reward/mean"]),
        **{name: found.value for name, found in measures.items() if name.startswith(("pass@", "reward_parts/"))},
        "policy_version/min": min(versions, default=None),
        "policy_version/max": max(versions, default=None),
        "completion_tokens/mean": measures["completion_tokens/mean"].value,
    }


def _find_standard_error(of: Measure) -> float | None:
    means = of.sums[of.counts > 0] / of.counts[of.counts > 0]
    return float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None


def _pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The chance that at least one of k samples passes, drawn without replacement from those that were made."""
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def tracked(line: Mapping[str, object], *, set_name: str, default: str) -> dict[str, float]:
    """The numbers of an evaluation as trackers, some of which refuse @, show them: `evaluation/math/pass_at_4`."""
    prefix = "evaluation" if set_name == default else f"evaluation/{set_name}"
    return {
        f"{prefix}/{name.replace('/', '_').replace('@', '_at_')}": float(value)
        for name, value in line.items()
        if isinstance(value, (int, float)) and name != "step"
    }


def _choose_ks(num_samples: int) -> list[int]:
    """The k of pass@k: powers of 2, and all samples."""
    powers = [2**n for n in range(num_samples.bit_length()) if 2**n <= num_samples]
    return sorted({*powers, num_samples} - {0})
