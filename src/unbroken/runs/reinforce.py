"""`reinforce`, which recipes call: a recipe brings the model and the problems.

torch and transformers are loaded by the call, not with this module: a mistake in a recipe's options costs no time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.rendering.base import Renderer
from unbroken.rollout.trajectory import Trajectory
from unbroken.runs.collector import EvaluationSet, Problems
from unbroken.runs.config import RunConfig
from unbroken.runs.curriculum import MakeCurriculum
from unbroken.runs.python_files import load_function

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


async def reinforce(
    config: RunConfig,
    *,
    model: str | Path,
    train_on: Problems,
    evaluate_on: Problems | Sequence[EvaluationSet],
    accelerator: Accelerator | None = None,
    curriculum: MakeCurriculum | None = None,
) -> TrainedRun:
    """Train `model`, a folder or a name on the hub, and write the run into `config.output`.

        metrics/metrics.jsonl    a line for each step (with TensorBoard's events beside it)
        evaluation.jsonl         a line for each evaluation of a set of problems
        rollouts/                a sample of each step's rollouts
        timeline/                what each process did when, for https://ui.perfetto.dev
        profiles/                traces of the steps in `config.profile_steps`
        checkpoints/             where the same command continues
        final/                   the trained model, for transformers and vLLM
        best/                    the model of the best evaluation (`config.evaluation.every`)
        models/step-00000100/    earlier ones, by choice (`config.export`)

    `curriculum` chooses the problems, instead of `config.curriculum`.

    `accelerator` is for a certain device, such as `Accelerator(cpu=True)`; otherwise it is made from the config.
    """
    from unbroken.runs.evaluation.schedule import check_sets
    from unbroken.runs.export.files import upload
    from unbroken.runs.opening import join_accelerator, open_run
    from unbroken.runs.stages import run_stages

    if curriculum is None and config.curriculum is not None:
        curriculum = load_function(config.curriculum, field="curriculum")
    accelerator = join_accelerator(config, accelerator)
    sets = [EvaluationSet(problems=evaluate_on)] if isinstance(evaluate_on, Problems) else evaluate_on
    check_sets(sets, config.evaluation)
    others = [each.problems for each in sets]
    async with open_run(config, model=model, train_on=train_on, evaluate_on=others, accelerator=accelerator) as run:
        final, rollouts = await run_stages(config, run, sets, curriculum)
    if config.export.push_to_hub is not None and accelerator.is_main_process:
        # The others do not wait: an upload may take longer than they would.
        message = f"{config.loop.num_steps} steps of training"
        address = await asyncio.to_thread(upload, final, config.export.push_to_hub, message=message)
        print(f"model at {address}")
    return TrainedRun(model=run.model, trainer=run.trainer, renderer=run.sampler.renderer, rollouts=rollouts)
