"""Run a recipe, and `train_model`, which it calls: a recipe brings the model and the problems.

    unbroken train      run_recipe ──────────► Recipe.run ──► train_model ──► a run (`runs.run`)
    unbroken eval       run_without_training ► Recipe.run ──► train_model ──► OpenRecipe.evaluate
    a sampler           run_sampler ─────────► Recipe.run ──► train_model ──► samples for the trainer
    a script                                                  train_model ──► a run

torch and transformers are loaded by the call, not with this module: a mistake in a recipe's options costs no time.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.errors import InvalidInputError, UnbrokenError
from unbroken.progress import show_progress
from unbroken.rendering.base import Renderer
from unbroken.rollout.failures import format_error, format_frames
from unbroken.rollout.trajectory import Trajectory
from unbroken.runs.chosen_numerics import choose_numerics
from unbroken.runs.collector import EvaluationSet, MakeCurriculum, Problems
from unbroken.runs.config import RunConfig
from unbroken.runs.folder import TRACEBACK, claim_folder, digest_files, lock_folder, open_private
from unbroken.runs.process_file import record_process
from unbroken.runs.processes import end_together, main_process_first
from unbroken.runs.recipe import OpenRecipe, Recipe, SamplerRole, load_recipe, open_recipe
from unbroken.runs.settings import describe
from unbroken.runs.signals import Terminated, run_until_terminated

if TYPE_CHECKING:
    from accelerate import Accelerator

    from unbroken.training.trainer import Trainer


def run_recipe(
    recipe: Recipe,
    options: Sequence[str] = (),
    *,
    words: Sequence[str] = (),
    digests: Mapping[str, str] | None = None,
    preflight: bool = True,
) -> None:
    """Run a recipe, or continue the run in its output folder. Of several processes, the first claims the folder.

    `words` open the recipe again in a sampler's process; without them there are no samplers. `digests` are of what
    belongs to the run and is in no file, by names that stay the same. With `preflight`, a run that begins samples a few
    rollouts first, and shows what they say.

    Raises:
        InvalidInputError: an option, or what the recipe names, is wrong, or the folder is another run's.
        Terminated: SIGTERM came; engines and files are closed.
    """
    config = recipe.configure(options)
    with ExitStack() as stack:
        opened = OpenRecipe(name=recipe.name, words=words, code=recipe.code, preflight=preflight)
        stack.callback(open_recipe.reset, open_recipe.set(opened))
        with main_process_first() as is_first:
            if is_first:
                stack.enter_context(lock_folder(config.output))
            config, said = choose_numerics(config, continues=None if is_first else True)
            if said and is_first:
                print(said, flush=True)
            settings = describe(config)
            files = digest_files(settings, code=recipe.code) | dict(digests or {})
            claim_folder(config.output, recipe.name, settings, files=files, code=recipe.code)
            if is_first:
                stack.enter_context(record_process(config.output))
                stack.enter_context(show_progress())
        try:
            run_until_terminated(end_together(recipe.run(config)))
        except (KeyboardInterrupt, Terminated) as ending:
            ending.add_note(_describe_rest(config.output))
            raise
        except Exception as error:
            _explain_failure(error, config.output / TRACEBACK)
            raise


def _describe_rest(output: Path) -> str:
    """What becomes of a run that was ended early."""
    if any((output / "checkpoints").glob("step-*")):
        return "the same command continues from the last checkpoint"
    return "there is no checkpoint yet, so the same command begins anew"


def run_sampler(path: Path | None, options: Sequence[str], role: SamplerRole) -> None:
    """Run a recipe as a sampler of the trainer that runs it, until that trainer ends.

    The folder of the run is not claimed: `train_model` samples instead of training.

    Raises:
        InvalidInputError: the recipe or an option is wrong, or another one than the trainer's.
        RolloutError: the trainer does not answer.
        Terminated: SIGTERM came, and the rest is for other samplers.
    """
    recipe = load_recipe(path)
    config = recipe.configure(options)
    opened = OpenRecipe(name=recipe.name, words=(), code=recipe.code, sampler=role)
    run_without_training(recipe, config, opened, run=asyncio.run if role.ends_with_parent else run_until_terminated)


def run_without_training(
    recipe: Recipe, config: RunConfig, opened: OpenRecipe, *, run: Callable[..., Any] = run_until_terminated
) -> None:
    """Run a recipe whose `train_model` samples or evaluates; raises `InvalidInputError` if it is not called."""
    before = open_recipe.set(opened)
    try:
        with show_progress():
            run(recipe.run(config))
    except _NotTrained:
        return
    finally:
        open_recipe.reset(before)
    raise InvalidInputError(
        f"{recipe.name} must call train_model, which samples in a sampler and evaluates in `unbroken eval`, and has not"
    )


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
    config, _ = choose_numerics(config, continues=False)  # of a script: a run of the command line has chosen
    sets = [EvaluationSet(problems=evaluate_on)] if isinstance(evaluate_on, Problems) else evaluate_on
    recipe = open_recipe.get()
    if recipe is not None and recipe.sampler is not None:
        from unbroken.runs.samplers import run_as_sampler

        await run_as_sampler(config, recipe.sampler, model=model, train_on=train_on, sets=sets)
        raise _NotTrained
    if recipe is not None and recipe.evaluate is not None:
        await recipe.evaluate(config, model=model, train_on=train_on, sets=sets)
        raise _NotTrained
    from unbroken.runs.run import run  # torch and transformers

    done, rollouts = await run(
        config, model=model, train_on=train_on, sets=sets, accelerator=accelerator, curriculum=curriculum
    )
    return TrainedRun(model=done.model, trainer=done.trainer, renderer=done.sampler.renderer, rollouts=rollouts)


def _explain_failure(error: Exception, path: Path) -> None:
    """Write the traceback of a failure in the user's own code into a file, and name the file.

    Raises:
        InvalidInputError: the exception is none of ours.
    """
    if not (frames := format_frames(error)):
        return
    with suppress(OSError):
        with open_private(path, "wb") as file:
            file.write("".join(traceback.format_exception(error)).encode("utf-8", "replace"))
        print(f"unbroken: the whole traceback of the next error is in {path}", file=sys.stderr)
    if not isinstance(error, UnbrokenError) and format_frames(error, raised_there=True):
        raise InvalidInputError(f"the run's own code failed with {format_error(error)}{frames}") from error


class _NotTrained(BaseException):
    """`train_model` has sampled for a trainer, which ended, or evaluated: the recipe's code after it is not run."""
