"""Train, evaluate or sample what a recipe gives: `Recipe.make_task` brings the model and the problems.

    unbroken train      run_recipe             make_task, then train_model
    unbroken eval       run_without_training   make_task, then an evaluation
    a sampler           run_sampler            make_task, then it samples for the trainer
    a script                                   a `Task` of its own, then train_model

torch and transformers are loaded by the call, not with this module: a mistake in a recipe's options costs no time.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.errors import InvalidInputError, UnbrokenError
from unbroken.progress import begin, show_progress
from unbroken.rendering.base import Renderer
from unbroken.rollout.failures import format_error, format_frames
from unbroken.rollout.trajectory import Trajectory
from unbroken.runs.chosen_numerics import choose_numerics
from unbroken.runs.config import EngineKind, RunConfig
from unbroken.runs.folder import TRACEBACK, claim_folder, digest_files, lock_folder, open_private, record_curriculum
from unbroken.runs.process_file import record_process
from unbroken.runs.processes import ended_together, join_processes, main_process_first
from unbroken.runs.recipe import OpenRecipe, Recipe, SamplerRole, Task, load_recipe, open_recipe
from unbroken.runs.settings import describe
from unbroken.runs.signals import Terminated, cancelled_by_sigterm
from unbroken.threads import keep_loop_responsive
from unbroken.types import Numerics

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
    run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run,
) -> None:
    """Train what a recipe gives, or continue the run in its output folder. Of several processes, the first claims it.

    `words` open the recipe again in a sampler's process; without them there are no samplers. `digests` are of what
    belongs to the run and is in no file, by names that stay the same. With `preflight`, a run that begins samples a few
    rollouts first, and shows what they say. `run` runs it in an event loop.

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
            run(_train(recipe, config, is_first=is_first))
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


async def _train(recipe: Recipe, config: RunConfig, *, is_first: bool) -> None:
    """Train what a recipe gives, until SIGTERM or the end of another of the run's processes ends it."""
    with cancelled_by_sigterm():
        async with ended_together():
            task = await recipe.make_task(config)
            if is_first:
                record_curriculum(config.output, task.curriculum_name)
            await train_model(config, task)


def run_sampler(path: Path | None, options: Sequence[str], role: SamplerRole) -> None:
    """Sample the problems of a recipe for the trainer that trains on them, until that trainer ends.

    The folder of the run is not claimed.

    Raises:
        InvalidInputError: the recipe or an option is wrong, or another one than the trainer's.
        RolloutError: the trainer does not answer.
        Terminated: SIGTERM came, and the rest is for other samplers.
    """
    recipe = load_recipe(path)
    config = recipe.configure(options)

    async def sample(config: RunConfig, task: Task) -> None:
        from unbroken.runs.samplers import run_as_sampler  # torch

        await run_as_sampler(config, task, role, recipe)

    run_without_training(recipe, config, sample, has_signals=not role.ends_with_parent)


def run_without_training(
    recipe: Recipe,
    config: RunConfig,
    use: Callable[[RunConfig, Task], Awaitable[None]],
    *,
    has_signals: bool = True,
) -> None:
    """Make a recipe's task, and use it otherwise than to train. Without `has_signals`, SIGTERM is left as it is.

    Raises:
        Terminated: SIGTERM came.
    """
    if config.trainer.numerics is Numerics.AUTO:  # the bits of a trainer matter to none of these
        config = replace(config, trainer=replace(config.trainer, numerics=Numerics.FAST))

    async def make_and_use() -> None:
        with cancelled_by_sigterm() if has_signals else nullcontext():
            await use(config, await recipe.make_task(config))

    with show_progress():
        asyncio.run(make_and_use())


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """A finished run, for code that continues with it in the same process."""

    model: Any
    """The trained model; the trainer's own, not a copy."""
    trainer: Trainer
    renderer: Renderer
    rollouts: tuple[Trajectory, ...]
    """This process's rollouts of the last evaluation, in the order of their problems; empty if none was made."""


async def train_model(config: RunConfig, task: Task, *, accelerator: Accelerator | None = None) -> TrainedRun:
    """Train the task's model, and write the run into `config.output`.

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

    `accelerator` is for a certain device, such as `Accelerator(cpu=True)`; otherwise it is made from the config.

    Raises:
        InvalidInputError: another run writes into `config.output`, or a setting cannot be had here.
    """
    from unbroken.runs.run import join_accelerator, open_training
    from unbroken.training.loop import open_steps

    with _keep_folder(config.output):
        config = _choose_for_script(config, task)
        accelerator = join_accelerator(config, accelerator)
        async with open_training(config, task, accelerator=accelerator) as training:
            num_steps, run, records = config.loop.num_steps, training.run, training.records
            if (
                not training.continues
            ):  # a run that continues compares its policies later, once its engine has its weights
                records.progress.console.print(await training.check.run(), soft_wrap=True, highlight=False)
                if (recipe := open_recipe.get()) is not None and recipe.preflight:
                    await run.show_preflight(config, records.progress.console)
            await training.evaluations.evaluate(0, "before")
            with keep_loop_responsive():
                opened = open_steps(
                    training.collector,
                    trainer=run.trainer,
                    publisher=run.engine.publisher,
                    metrics=records.metrics,
                    config=config.chosen_loop,
                    observer=training.observer,
                    checkpoints=training.checkpoints,
                    engine=run.engine.engine if config.engine.kind is EngineKind.SERVER else None,
                    timeline=records.timeline,
                    warm_start=run.warm_start,
                )
                async with opened as steps:
                    await steps.run()
                if training.background is not None:
                    await training.background.finish()
                with records.timeline.span("final model"):
                    final = await asyncio.to_thread(training.models.write_final, num_steps)
                rollouts = await training.evaluations.evaluate(num_steps, "after")
            training.evaluations.log()
            begin("closing the engine")
            records.progress.show_end(config.output, model=final)
        await asyncio.to_thread(training.models.upload_final, final, num_steps)
        return TrainedRun(model=run.model, trainer=run.trainer, renderer=run.sampler.renderer, rollouts=rollouts)


@contextmanager
def _keep_folder(output: Path) -> Iterator[None]:
    """Keep other runs out of the folder of a script's run; that of a recipe is locked since it was claimed."""
    with ExitStack() as stack:
        if open_recipe.get() is None:
            with main_process_first() as is_first:
                if is_first:
                    stack.enter_context(lock_folder(output))
        yield


def _choose_for_script(config: RunConfig, task: Task) -> RunConfig:
    """The config with the numerics of its run; those of a run of the command line are chosen and said by now."""
    config, said = choose_numerics(config, model=task.model)
    if said and join_processes().is_main_process:
        print(said, flush=True)
    return config


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
