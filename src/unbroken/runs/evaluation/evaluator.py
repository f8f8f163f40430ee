"""Evaluations of one set of problems, on the same problems with the same seeds each time, in `evaluation.jsonl`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from unbroken.errors import (
    EngineError,
    MetricsError,
    OutageError,
    RolloutError,
    ServerUnreachableError,
)
from unbroken.rollout.failures import format_error, format_frames
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup, TrajectoryStatus
from unbroken.runs.collector import DEFAULT_SET, Sampler
from unbroken.runs.processes import Rank
from unbroken.runs.records.files import find_records
from unbroken.runs.records.record import describe_groups, write_groups
from unbroken.training.model.sharding import fail_together

_FILE = "evaluation.jsonl"
FOLDER = "evaluations"
"""All rollouts of evaluations, in a folder for each set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation of a policy on one set."""

    numbers: Mapping[str, Any]
    """The line of `evaluation.jsonl`."""
    groups: tuple[TrajectoryGroup, ...] = ()
    """This process's groups, in the order of their problems; empty where the numbers were read from the file."""

    def get_values(self) -> dict[str, float]:
        """Those of the numbers that are numbers."""
        return {name: value for name, value in self.numbers.items() if isinstance(value, (int, float))}

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The rollouts of `groups`."""
        return tuple(trajectory for group in self.groups for trajectory in group.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Rolls out each problem of a set, with the same seeds in every evaluation, so that only the policy differs."""

    sampler: Sampler
    num_problems: int
    num_samples: int = 1
    pass_reward: float = 1.0
    output: Path
    rank: Rank
    name: str = DEFAULT_SET
    source: str | None = None
    """The model that is evaluated, whose tokenizer makes the ids."""

    async def evaluate(self, step: int, *, num_lost: int = 0) -> Evaluation | None:
        """Evaluate the policy after `step` steps, or read the numbers from the file if they are there.

        Returns None without problems, and at step 0 if the engine has newer weights.

        Raises:
            OutageError: the engine went away, and nothing was measured.
            RolloutError: every rollout failed.
            MetricsError: the file cannot be written.
        """
        if self.num_problems == 0:
            return None
        if (found := self.find(step)) is not None:
            return found
        if step == 0 and self.sampler.engine.policy_version > 0:
            return None
        groups: Sequence[TrajectoryGroup] = ()
        lost: OutageError | None = None
        with fail_together():
            try:
                groups = await self.sample()
            except OutageError as error:
                lost = error
        if any(gather_object([lost is not None])):
            raise lost or OutageError("another process lost the engine of the evaluation")
        return await self.record(step, groups, num_lost=num_lost)

    def find(self, step: int) -> Evaluation | None:
        """The numbers in the file of the evaluation after `step` steps; None if there are none."""
        key = (step, *self._key)
        lines = (line for line in read_evaluations(self.output) if _key(line) == key)
        return next((Evaluation(numbers=line) for line in lines), None)

    async def sample(self) -> list[TrajectoryGroup]:
        """Sample this process's problems. It waits for no other process.

        Raises:
            OutageError: the gateway of agents is gone. (Other rollouts keep such an error in their trajectory.)
        """
        try:
            return await self.sampler.sample_groups(self._numbers, size=self.num_samples)
        except ServerUnreachableError as error:
            raise _make_outage(format_error(error)) from error

    async def record(self, step: int, groups: Sequence[TrajectoryGroup], *, num_lost: int = 0) -> Evaluation:
        """Write the rollouts and the line of an evaluation after `step` steps, of the groups that each process sampled.

        `num_lost` is how many evaluations the run has lost so far because their engine went away.

        Raises as `evaluate` does.
        """
        samples = gather_samples(dict(zip(self._numbers, groups, strict=True)))
        found = summarize(samples, pass_reward=self.pass_reward)
        new = {"step": step, "set": self.name, **found, "num_samples": self.num_samples, "num_lost": num_lost}
        head = {
            "step": step, "set": self.name, "rank": self.rank.index, "num_processes": self.rank.num_processes,
            "policy_version": found["policy_version/max"], "model": self.source, "counters": {},
        }  # fmt: skip
        with fail_together():
            folder, first = self.output / FOLDER / self.name, head | describe_groups(groups)
            await asyncio.to_thread(write_groups, folder, first, groups)
            if self.rank.index == 0:
                _write(self.output / _FILE, [*read_evaluations(self.output), new])
        return Evaluation(numbers=new, groups=tuple(groups))

    def find_last_step(self) -> int:
        """After how many steps the last evaluation in the file began; 0 for an empty file."""
        return max(
            (step for step, *rest in map(_key, read_evaluations(self.output)) if tuple(rest) == self._key), default=0
        )

    @property
    def _key(self) -> tuple[str, int, int]:
        return self.name, self.num_problems, self.num_samples

    @property
    def _numbers(self) -> Sequence[int]:
        return self.rank.select(range(self.num_problems))


def read_evaluations(output: Path) -> list[dict[str, Any]]:
    """The evaluations of a run so far: `step`, `set`, and the numbers of `summarize`."""
    path = output / _FILE
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def cut_evaluations(output: Path, last_step: int) -> None:
    """Remove the evaluations after more steps than this, with their rollouts."""
    for folder in (output / FOLDER).glob("*"):
        for (step, _), path in find_records(folder).items():
            if step > last_step:
                path.unlink()
    lines = read_evaluations(output)
    if any(line["step"] > last_step for line in lines):
        _write(output / _FILE, [line for line in lines if line["step"] <= last_step])


def gather_samples(groups: Mapping[int, TrajectoryGroup]) -> list[list[Sample]]:
    """The samples of the problems of all processes, by number; an error in one process is raised in all."""
    mine = {number: [Sample.of(each) for each in group.trajectories] for number, group in groups.items()}
    errors = [
        (isinstance(each.error, EngineError), format_error(each.error) + format_frames(each.error))
        for group in groups.values()
        for each in group.trajectories
        if each.error is not None
    ]
    everyone = gather_object([(mine, errors)])
    of_problem = {number: samples for found, _ in everyone for number, samples in found.items()}
    failed = [error for _, found in everyone for error in found]
    lost = next((message for is_lost, message in failed if is_lost), None)
    if lost is not None:
        raise _make_outage(lost)
    if len(failed) == sum(map(len, of_problem.values())):
        raise RolloutError(f"all {len(failed)} rollouts of the evaluation failed, the first with {failed[0][1]}")
    return [of_problem[number] for number in sorted(of_problem)]


def _make_outage(reason: str) -> OutageError:
    return OutageError(
        f"the evaluation lost its engine ({reason}): once the engine is back, the same command evaluates again "
        "(`unbroken eval` needs another --output)"
    )


def _key(line: Mapping[str, Any]) -> tuple[int, str, int, int]:
    """What tells evaluations apart. Lines of earlier versions have one set, and one sample of each problem."""
    num_samples = line.get("num_samples", 1)
    num_problems = line.get("num_problems", line["num_rollouts"])
    return line["step"], line.get("set", DEFAULT_SET), num_problems, num_samples


def _write(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write all lines or none: a run cannot continue from a line that a full disk cut short."""
    part = path.with_name(f"{_FILE}.part")
    try:
        part.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        part.replace(path)
    except OSError as error:
        raise MetricsError(f"the evaluation cannot be written: {error}. Make room and start the run again") from error


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
    """The numbers of the samples of each problem: mean reward, its standard error, and pass@k.

    Worked example, 2 problems with 4 samples each, and rewards of 1 for success:

        problem 0    1 0 0 0    mean 1/4    1 of 4 passes
        problem 1    1 1 0 0    mean 2/4    2 of 4 pass

        reward/mean              3/8
        reward/standard_error    std(1/4, 2/4) / sqrt(2) = 1/8
        pass@1                   (1/4 + 2/4) / 2 = 3/8
        pass@2                   ((1 - C(3, 2) / C(4, 2)) + (1 - C(2, 2) / C(4, 2))) / 2 = (1/2 + 5/6) / 2 = 2/3
        pass@4                   1

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
    for k in choose_ks(max(map(len, scored), default=0)):
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


def choose_ks(num_samples: int) -> list[int]:
    """The k of pass@k: powers of 2, and all samples."""
    powers = [2**n for n in range(num_samples.bit_length()) if 2**n <= num_samples]
    return sorted({*powers, num_samples} - {0})
