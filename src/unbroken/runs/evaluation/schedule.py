"""When a run evaluates, and what becomes of it: a line on the terminal, numbers in trackers, and the best model.

before the first step ── every N steps ── after the last          each on all sets, between two steps
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from unbroken.rollout.trajectory import Trajectory
from unbroken.runs.collector import DEFAULT_SET, EvaluationSet, Sampler
from unbroken.runs.config import EvaluationConfig
from unbroken.runs.evaluation.evaluator import Evaluation, Evaluator
from unbroken.runs.evaluation.numbers import tracked
from unbroken.runs.export.kept import KeptModels
from unbroken.timeline import Timeline
from unbroken.training.metrics.writer import MetricsWriter

_MAX_PARTS = 6
"""An environment may note more numbers than fit on a line."""


def make_evaluators(
    sets: Sequence[EvaluationSet], config: EvaluationConfig, sampler: Sampler, *, seed: int, **shared: Any
) -> list[Evaluator]:
    """Make the evaluator of each set, with its own seeds."""
    return [
        Evaluator(
            name=each.name,
            sampler=replace(
                sampler,
                problems=each.problems,
                seed=(seed, 1) if each.name == DEFAULT_SET else (seed, 1, *each.name.encode()),
                sampling=each.sampling or config.sampling,
            ),
            num_problems=config.num_problems if each.num_problems is None else each.num_problems,
            num_samples=each.num_samples or config.num_samples,
            pass_reward=config.pass_reward,
            **shared,
        )
        for each in sets
    ]


@dataclass(slots=True, kw_only=True)
class Evaluations:
    """The evaluations of one run."""

    evaluators: Sequence[Evaluator]
    config: EvaluationConfig
    models: KeptModels
    console: Console
    metrics: MetricsWriter | None
    """Of the first process; None in others."""
    timeline: Timeline
    num_lost: int = 0
    """Evaluations that were lost because their engine went away, since the run was started; in each line."""
    _unlogged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Before the first step, the run may still remove later steps from trackers."""

    def is_due(self, num_steps: int, *, last: int) -> bool:
        """Whether to evaluate after `num_steps` steps; `last` has its own evaluation, at the end."""
        return self.config.every > 0 and num_steps % self.config.every == 0 and num_steps < last

    async def evaluate(self, num_steps: int, when: str) -> tuple[Trajectory, ...]:
        """Evaluate on all sets, and keep the model if it is the best so far; returns this process's rollouts.

        Raises as `Evaluator.evaluate` does, and as `KeptModels.write_best`.
        """
        rollouts: tuple[Trajectory, ...] = ()
        for evaluator in self.evaluators:
            with self.timeline.span(f"evaluation of {evaluator.name}", num_steps=num_steps):
                evaluation = await evaluator.evaluate(num_steps, num_lost=self.num_lost)
            if evaluation is None:
                continue
            rollouts += evaluation.trajectories
            self.show(evaluator, evaluation, num_steps, when)
            if self.decides_best(evaluator) and num_steps > 0 and self.config.every > 0:
                found = evaluation.get_values()
                await asyncio.to_thread(self.models.write_best, num_steps, found, by="reward/mean")
        return rollouts

    def show(self, evaluator: Evaluator, evaluation: Evaluation, num_steps: int, when: str) -> None:
        """Print the numbers of an evaluation, and keep them for the trackers."""
        numbers = evaluation.numbers
        self._unlogged.append((num_steps, tracked(numbers, set_name=evaluator.name, default=DEFAULT_SET)))
        name = "" if evaluator.name == DEFAULT_SET else f"{evaluator.name}: "
        self.console.print(f"{name}reward {when} {format_numbers(numbers)}")

    def decides_best(self, evaluator: Evaluator) -> bool:
        """Whether this set decides which model is best."""
        return evaluator.name == (self.config.best_set or self.evaluators[0].name)

    def log(self) -> None:
        """Log what was measured since the last call to the trackers."""
        for num_steps, values in self._unlogged:
            if self.metrics is not None:
                self.metrics.log_evaluation(num_steps, values)
        self._unlogged.clear()


def format_numbers(numbers: Any) -> str:
    """The numbers of an evaluation in a few words: the mean reward with its error and its parts, and pass@k."""
    error, parts = numbers.get("reward/standard_error"), format_parts(numbers, "reward_parts/(.+)")
    passes = [
        f"  {name} {value:.3f}" for name, value in numbers.items() if name.startswith("pass@") and name != "pass@1"
    ]
    return f"{numbers['reward/mean']:.3f}{'' if error is None else f' ± {error:.3f}'}{parts}{''.join(passes)}"


def format_parts(numbers: Mapping[str, Any], pattern: str) -> str:
    """The means of what several functions gave, before their weights, in brackets; nothing of one alone.

    They have names of this pattern: 0.42 of two functions is followed by ` (correct 0.375, one_lookup 0.45)`.
    """
    found = {match[1]: value for name, value in numbers.items() if (match := re.fullmatch(pattern, name))}
    known = [f"{name} {value:.3g}" for name, value in sorted(found.items()) if value is not None]
    more = [f"{len(known) - _MAX_PARTS} more"] if len(known) > _MAX_PARTS else []
    return f" ({', '.join(known[:_MAX_PARTS] + more)})" if len(known) > 1 else ""
