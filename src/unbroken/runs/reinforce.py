"""`reinforce`: the run, from top to bottom. A recipe brings the model and the problems."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from unbroken.errors import InvalidInputError
from unbroken.rendering.base import Renderer
from unbroken.rollout.trajectory import Trajectory
from unbroken.runs.collector import Collector, Problems, Sampler
from unbroken.runs.config import EngineKind, Precision, RunConfig
from unbroken.runs.engines import open_engine
from unbroken.runs.evaluation import Evaluator
from unbroken.runs.models import load_model, load_model_renderer, prepare_model
from unbroken.runs.processes import Rank, join_processes, uses_cpu
from unbroken.runs.progress import StageProgress
from unbroken.runs.settings.build import describe
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.loop import train
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
    evaluate_on: Problems,
    accelerator: Accelerator | None = None,
) -> TrainedRun:
    """Train `model`, a folder or a name on the hub, and write the run into `config.output`.

        metrics/metrics.jsonl    a line for each step (with TensorBoard's events beside it)
        evaluation.jsonl         the mean reward before the first step and after the last
        checkpoints/             where the same command continues

    `accelerator` is for a certain device, such as `Accelerator(cpu=True)`; otherwise it is made from the config.
    """
    join_processes()
    accelerator = accelerator or Accelerator(
        cpu=uses_cpu(), mixed_precision="bf16" if config.precision is Precision.BFLOAT16 else None
    )
    keep_float32(accelerator)
    check_model_copies(config.engine.kind, accelerator)
    rank = Rank(index=accelerator.process_index, num_processes=accelerator.num_processes)
    renderer = load_model_renderer(model, config.renderer)
    policy = load_model(model)
    output, num_steps = config.output, config.loop.num_steps
    async with open_engine(
        config.engine, model=policy, source=model, output=output, device=accelerator.device, rank=rank
    ) as opened:
        seed = (config.seed, 0)
        sampler = Sampler(engine=opened.engine, renderer=renderer, config=config.rollouts, problems=train_on, seed=seed)
        collect = Collector(sampler, rank=rank)
        evaluator = Evaluator(
            sampler=replace(sampler, problems=evaluate_on, seed=(config.seed, 1), sampling=config.evaluation.sampling),
            num_problems=config.evaluation.num_problems,
            output=output,
            rank=rank,
        )
        policy, reference = prepare_model(policy, config)
        trainer = Trainer(
            policy, config.trainer, objective=config.objective, accelerator=accelerator, reference=reference
        )
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

            def on_step(step: int, logged: Metrics) -> None:
                progress.show_step(step, logged, num_steps=num_steps)

            async def evaluate(step: int, name: str) -> tuple[Trajectory, ...]:
                evaluation = await evaluator.evaluate(step)
                if evaluation is None:
                    return ()
                progress.console.print(f"reward {name} {evaluation.mean_reward:.3f}")
                return evaluation.trajectories

            await evaluate(0, "before")
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
            )
            rollouts = await evaluate(num_steps, "after")
    return TrainedRun(model=policy, trainer=trainer, renderer=renderer, rollouts=rollouts)


def check_model_copies(kind: EngineKind, accelerator: Accelerator) -> None:
    """Raise `InvalidInputError` if each process has its own engine, but only the first one loads the model."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if kind is EngineKind.EMBEDDED and plugin is not None and plugin.cpu_ram_efficient_loading:
        raise InvalidInputError(
            "engine.kind embedded needs the model in every process, but only the first one loads it: give "
            "accelerate launch `--fsdp_cpu_ram_efficient_loading false`"
        )
