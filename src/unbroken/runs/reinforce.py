"""`reinforce`: the run, from top to bottom. A recipe brings the model and the problems."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from unbroken.errors import InvalidInputError
from unbroken.rendering.base import Renderer
from unbroken.rollout.trajectory import Trajectory
from unbroken.runs.collector import Collector, Problems, Sampler
from unbroken.runs.config import EngineKind, Precision, RunConfig
from unbroken.runs.engines import open_engine
from unbroken.runs.evaluation.evaluator import EvaluationSet
from unbroken.runs.evaluation.schedule import Evaluations, check_sets, make_evaluators
from unbroken.runs.export.hub import create_repository, upload
from unbroken.runs.export.kept import KeptModels
from unbroken.runs.models import load_image_inputs, load_model, load_model_renderer, locate, prepare_model
from unbroken.runs.processes import Rank, join_processes, uses_cpu
from unbroken.runs.profiling import FOLDER as PROFILES
from unbroken.runs.profiling import StepProfiler, parse_steps
from unbroken.runs.progress import StageProgress
from unbroken.runs.records.files import FOLDER
from unbroken.runs.records.recorder import Recorder, make_table
from unbroken.runs.sessions import open_sessions
from unbroken.runs.settings.build import describe
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.loop import StepRollouts, train
from unbroken.training.metrics.writer import Metrics, MetricsWriter
from unbroken.training.model.sharding import keep_float32
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
) -> TrainedRun:
    """Train `model`, a folder or a name on the hub, and write the run into `config.output`.

        metrics/metrics.jsonl    a line for each step (with TensorBoard's events beside it)
        evaluation.jsonl         a line for each evaluation of a set of problems
        rollouts/                a sample of each step's rollouts
        profiles/                traces of the steps in `config.profile_steps`
        checkpoints/             where the same command continues
        final/                   the trained model, for transformers and vLLM
        best/                    the model of the best evaluation (`config.evaluation.every`)
        models/step-00000100/    earlier ones, by choice (`config.export`)

    `accelerator` is for a certain device, such as `Accelerator(cpu=True)`; otherwise it is made from the config.
    """
    join_processes()
    accelerator = accelerator or Accelerator(
        cpu=uses_cpu(), mixed_precision="bf16" if config.precision is Precision.BFLOAT16 else None
    )
    keep_float32(accelerator)
    check_model_copies(config.engine.kind, accelerator)
    rank = Rank(index=accelerator.process_index, num_processes=accelerator.num_processes)
    sets = [EvaluationSet(problems=evaluate_on)] if isinstance(evaluate_on, Problems) else evaluate_on
    check_sets(sets, config.evaluation)
    have_images = train_on.has_images or any(each.problems.has_images for each in sets)
    images = load_image_inputs(model, config, prompts_have_images=have_images)
    processor = None if images is None else images.processor
    renderer = load_model_renderer(model, config.renderer, images=images)
    policy = load_model(model, takes_images=images is not None)
    output, num_steps = config.output, config.loop.num_steps
    async with AsyncExitStack() as outer:
        opened = await outer.enter_async_context(
            open_engine(
                config.engine,
                model=policy,
                source=model,
                output=output,
                device=accelerator.device,
                rank=rank,
                image_processor=processor,
                adapter_rank=config.adapter_rank,
            )
        )
        sessions = None
        if any(problems.agent is not None for problems in (train_on, *(each.problems for each in sets))):
            opening = open_sessions(config, engine=opened.engine, model=model, images=images, rank=rank)
            sessions = await outer.enter_async_context(opening)
        seed = (config.seed, 0)
        sampler = Sampler(
            engine=opened.engine,
            renderer=renderer,
            config=config.rollouts,
            problems=train_on,
            seed=seed,
            sessions=sessions,
        )
        collect = Collector(sampler, rank=rank)
        evaluators = make_evaluators(sets, config.evaluation, sampler, seed=config.seed, output=output, rank=rank)
        policy, reference = prepare_model(policy, config)
        trainer = Trainer(
            policy,
            config.trainer,
            objective=config.objective,
            accelerator=accelerator,
            images=processor,
            reference=reference,
        )
        models = KeptModels(config=config.export, trainer=trainer, source=locate(model), output=output)
        recorder = Recorder(
            config=config.rollout_log, trainer=trainer, source=locate(model), folder=output / FOLDER, rank=rank
        )
        with trainer.fail_together():
            if trainer.is_main_process:
                models.remove_unfinished()
                if config.export.push_to_hub is not None:
                    create_repository(config.export.push_to_hub, private=config.export.private)
        checkpoints = Checkpoints(
            output / "checkpoints",
            every=config.checkpoints.every,
            num_kept=config.checkpoints.num_kept,
            caller=collect,
        )
        with StageProgress(quiet=not accelerator.is_main_process) as progress, ExitStack() as stack:
            metrics = None
            if accelerator.is_main_process:
                writer = MetricsWriter(output / "metrics", trackers=config.trackers, settings=describe(config))
                metrics = stack.enter_context(writer)
            profiler = StepProfiler(parse_steps(config.profile_steps), output / PROFILES, rank=rank.index)
            stack.callback(profiler.close)

            evaluations = Evaluations(
                evaluators=evaluators,
                config=config.evaluation,
                models=models,
                console=progress.console,
                metrics=metrics,
            )

            def on_step(step: int, logged: Metrics) -> None:
                progress.show_step(step, logged, num_steps=num_steps)
                evaluations.log()

            async def after_step(num_made: int) -> None:
                await asyncio.to_thread(models.write_step, num_made)
                if evaluations.is_due(num_made, last=num_steps):
                    await evaluations.evaluate(num_made, f"after step {num_made}")

            async def on_rollouts(rollouts: StepRollouts) -> None:
                await recorder.record(rollouts)
                with trainer.fail_together():
                    if config.log_completions > 0 and metrics is not None:
                        columns, rows = make_table(rollouts, trainer, config.log_completions)
                        progress.show_completions(rollouts.step, columns, rows)
                        metrics.log_table(rollouts.step, "completions", columns, rows)

            await evaluations.evaluate(0, "before")
            await train(
                collect,
                trainer=trainer,
                publisher=opened.publisher,
                metrics=metrics,
                config=config.loop,
                on_step=on_step,
                checkpoints=checkpoints,
                engine=opened.engine if config.engine.kind is EngineKind.SERVER else None,
                before_step=opened.before_step,
                after_step=after_step,
                on_rollouts=on_rollouts,
                around_step=profiler.step,
            )
            final = await asyncio.to_thread(models.write_final, num_steps)
            rollouts = await evaluations.evaluate(num_steps, "after")
            evaluations.log()
            progress.console.print(f"model in {final}")
    if config.export.push_to_hub is not None and accelerator.is_main_process:
        # The others do not wait: an upload may take longer than they would.
        message = f"{num_steps} steps of training"
        address = await asyncio.to_thread(upload, final, config.export.push_to_hub, message=message)
        print(f"model at {address}")
    return TrainedRun(model=policy, trainer=trainer, renderer=renderer, rollouts=rollouts)


def check_model_copies(kind: EngineKind, accelerator: Accelerator) -> None:
    """Raise `InvalidInputError` if each process has its own engine, but only the first one loads the model."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if kind is EngineKind.EMBEDDED and plugin is not None and plugin.cpu_ram_efficient_loading:
        raise InvalidInputError(
            "engine.kind embedded needs the model in every process, but only the first one loads it: give "
            "accelerate launch `--fsdp_cpu_ram_efficient_loading false`"
        )
