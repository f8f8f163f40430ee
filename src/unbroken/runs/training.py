"""`train_model`, which recipes call: a recipe brings the model and the problems.

torch and transformers are loaded by the call, not with this module: a mistake in a recipe's options costs no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.rendering.base import Renderer
from unbroken.rollout.trajectory import Trajectory
from unbroken.runs.collector import EvaluationSet, MakeCurriculum, Problems
from unbroken.runs.config import RunConfig
from unbroken.runs.recipe import NotTrained, open_recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

    from unbroken.training.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """A finished run, for code that continues with it in the same process."""

    model: Any
    """The trained model; the trainer's own, not a copy."""
    trainer: Trainer
    renderer: Renderer
    rollouts: tuple[Trajectory, ...]
    """This process's rollouts of the last evaluation, in the order of their problems; empty if none was made."""


async def train_model(
    config: RunConfig,
    *,
    model: str | Path,
    train_on: Problems,
    evaluate_on: Problems | Sequence[EvaluationSet],
    accelerator: Accelerator | None = None,
    curriculum: MakeCurriculum | None = None,
) -> TrainedRun:
    """Train `model`, a folder or a name on the hub, and write the run into `config.output`.

        metrics/metrics.jsonl    a line for each step (with TensorBoard's events next to it)
        evaluation.jsonl         a line for each evaluation of a set of problems
        evaluations/             all rollouts of each evaluation
        rollouts/                a sample of each step's rollouts
        timeline/                what each process did when, for https://ui.perfetto.dev
        profiles/                traces of the steps in `config.profile_steps`
        checkpoints/             where the same command continues
        final/                   the trained model, for transformers and vLLM
        best/                    the model of the best evaluation (`config.evaluation.every`)
        models/step-00000100/    earlier ones, by choice (`config.export`)

    `curriculum` chooses the problems, instead of `config.curriculum`.

    In a sampler (`unbroken sampler`) this samples for the trainer, and in `unbroken eval` it evaluates: it does not
    return.

    `accelerator` is for a certain device, such as `Accelerator(cpu=True)`; otherwise it is made from the config.
    """
    sets = [EvaluationSet(problems=evaluate_on)] if isinstance(evaluate_on, Problems) else evaluate_on
    recipe = open_recipe.get()
    if recipe is not None and recipe.sampler is not None:
        from unbroken.runs.samplers import run_as_sampler

        await run_as_sampler(config, recipe.sampler, model=model, train_on=train_on, sets=sets)
        raise NotTrained
    if recipe is not None and recipe.evaluate is not None:
        await recipe.evaluate(config, model=model, train_on=train_on, sets=sets)
        raise NotTrained
    from unbroken.runs.run import run  # torch and transformers

    done, rollouts = await run(
        config, model=model, train_on=train_on, sets=sets, accelerator=accelerator, curriculum=curriculum
    )
    return TrainedRun(model=done.model, trainer=done.trainer, renderer=done.sampler.renderer, rollouts=rollouts)
