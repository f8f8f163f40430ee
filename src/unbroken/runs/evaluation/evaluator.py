"""Evaluations of one set of problems, on the same problems with the same seeds each time, in `evaluation.jsonl`."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from unbroken.errors import MetricsError, OutageError, RolloutError, ServerUnreachableError
from unbroken.progress import begin
from unbroken.rollout.failures import format_error
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.runs.collector import DEFAULT_SET, Keep, Sampler
from unbroken.runs.evaluation.numbers import Sample, summarize
from unbroken.runs.processes import Rank
from unbroken.runs.records.files import find_records, read_records
from unbroken.runs.records.record import describe_rewards, merge_records, write_groups
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
        self._begin(self._numbers)
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

    async def evaluate_kept(self) -> tuple[Evaluation, list[list[Sample]]]:
        """Evaluate the policy before the first step, in one process, and continue where an earlier call ended.

        Each group is kept in its own file once it is sampled; when all are there, one file takes their place.
        Raises as `evaluate` does, at the first group that lost its engine.
        """
        folder, kept = self.output / FOLDER / self.name, await asyncio.to_thread(self.read_kept)

        async def keep(number: int, group: TrajectoryGroup) -> None:
            samples = [Sample.of(each) for each in group.trajectories]
            _check_engine(samples)
            head = self._make_head(0, [samples]) | {"rank": number + 1, "num_processes": self.num_problems + 1}
            await asyncio.to_thread(write_groups, folder, head, [group])
            kept[number] = samples

        left = [number for number in self._numbers if number not in kept]
        self._begin(left)
        await self._sample(left, keep)
        samples = [kept[number] for number in self._numbers]
        _check_failures(samples)
        if list(find_records(folder)) != [(0, 0)]:
            await asyncio.to_thread(merge_records, folder, self._make_head(0, samples))
        line = self._make_line(0, samples)
        if self.find(0) is None:
            _add(self.output, line)
        return Evaluation(numbers=line), samples

    def read_kept(self) -> dict[int, list[Sample]]:
        """The samples of the groups that `evaluate_kept` kept, by problem, but of groups with a rollout that failed."""
        files = find_records(self.output / FOLDER / self.name)
        if (whole := files.get((0, 0))) is not None:
            return dict(enumerate(read_samples(whole)))
        found = {rank - 1: samples for (_, rank), path in files.items() for samples in read_samples(path)}
        return {number: each for number, each in found.items() if all(sample.error is None for sample in each)}

    async def sample(self) -> list[TrajectoryGroup]:
        """Sample this process's problems. It waits for no other process.

        Raises:
            OutageError: the gateway of agents is gone. (Other rollouts keep such an error in their trajectory.)
        """
        return await self._sample(self._numbers)

    def _begin(self, numbers: Sequence[int]) -> None:
        name = self.name if self.name == DEFAULT_SET else f"evaluation of {self.name}"
        begin(name, total=len(numbers) * self.num_samples, unit="rollouts")

    async def _sample(self, numbers: Sequence[int], keep: Keep | None = None) -> list[TrajectoryGroup]:
        try:
            return await self.sampler.sample_groups(numbers, size=self.num_samples, keep=keep)
        except ServerUnreachableError as error:
            raise _make_outage(format_error(error)) from error

    async def record(self, step: int, groups: Sequence[TrajectoryGroup], *, num_lost: int = 0) -> Evaluation:
        """Write the rollouts and the line of an evaluation after `step` steps, of the groups that each process sampled.

        `num_lost` is how many evaluations the run has lost so far because their engine went away.

        Raises as `evaluate` does.
        """
        samples = _gather_samples(dict(zip(self._numbers, groups, strict=True)))
        new = self._make_line(step, samples) | {"num_lost": num_lost}
        mine = [samples[number] for number in self._numbers]
        head = self._make_head(step, mine) | {"policy_version": new["policy_version/max"]}
        with fail_together():
            await asyncio.to_thread(write_groups, self.output / FOLDER / self.name, head, groups)
            if self.rank.index == 0:
                _add(self.output, new)
        return Evaluation(numbers=new, groups=tuple(groups))

    def _make_line(self, step: int, samples: Sequence[Sequence[Sample]]) -> dict[str, Any]:
        found = summarize(samples, pass_reward=self.pass_reward)
        return {"step": step, "set": self.name, **found, "num_samples": self.num_samples, "num_lost": 0}

    def _make_head(self, step: int, samples: Sequence[Sequence[Sample]]) -> dict[str, Any]:
        versions = [version for of_problem in samples for each in of_problem for version in each.versions]
        return {
            "step": step, "set": self.name, "rank": self.rank.index, "num_processes": self.rank.num_processes,
            "policy_version": max(versions, default=None), "model": self.source, "counters": {},
            **describe_rewards([[each.reward for each in of_problem] for of_problem in samples]),
        }  # fmt: skip

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
    with _lock_lines(output):
        lines = read_evaluations(output)
        if any(line["step"] > last_step for line in lines):
            _write(output / _FILE, [line for line in lines if line["step"] <= last_step])


def _gather_samples(groups: Mapping[int, TrajectoryGroup]) -> list[list[Sample]]:
    """The samples of the problems of all processes, by number; an error in one process is raised in all."""
    mine = {number: [Sample.of(each) for each in group.trajectories] for number, group in groups.items()}
    of_problem = {number: samples for found in gather_object([mine]) for number, samples in found.items()}
    samples = [of_problem[number] for number in sorted(of_problem)]
    for each in samples:
        _check_engine(each)
    _check_failures(samples)
    return samples


def read_samples(path: Path) -> list[list[Sample]]:
    """The samples of each group in a file of rollouts; raises as `read_records` does."""
    groups: dict[str, list[Sample]] = {}
    for record in itertools.islice(read_records(path), 1, None):
        groups.setdefault(record["group"], []).append(Sample.read(record))
    return list(groups.values())


def _check_engine(samples: Sequence[Sample]) -> None:
    if (lost := next((each.error for each in samples if each.has_lost_engine), None)) is not None:
        raise _make_outage(lost)


def _check_failures(problems: Sequence[Sequence[Sample]]) -> None:
    samples = list(itertools.chain.from_iterable(problems))
    errors = [each.error for each in samples if each.error is not None]
    if len(errors) == len(samples):
        raise RolloutError(f"all {len(samples)} rollouts of the evaluation failed, the first with {errors[0]}")


def _make_outage(reason: str) -> OutageError:
    return OutageError(f"the evaluation lost its engine ({reason}): the same command continues once it is back")


def _key(line: Mapping[str, Any]) -> tuple[int, str, int, int]:
    """What tells evaluations apart."""
    return line["step"], line["set"], line["num_problems"], line["num_samples"]


def _add(output: Path, new: Mapping[str, Any]) -> None:
    """Add a line, in place of one of the same evaluation: two processes may have made it."""
    with _lock_lines(output):
        lines = [line for line in read_evaluations(output) if _key(line) != _key(new)]
        _write(output / _FILE, [*lines, new])


@contextmanager
def _lock_lines(output: Path) -> Iterator[None]:
    """Keep other processes from changing the lines during the block: a run, and what follows it."""
    descriptor = os.open(output, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write all lines or none: a run cannot continue from a line that a full disk cut short."""
    part = path.with_name(f"{_FILE}.part")
    try:
        part.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        part.replace(path)
    except OSError as error:
        raise MetricsError(f"the evaluation cannot be written: {error}. Make room and start the run again") from error
