"""A run, top to bottom: what recipes have in common once they have a model and problems."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator

from unbroken.errors import InvalidInputError
from unbroken.runs.collector import Collector, Problems, Sampler, Share
from unbroken.runs.config import EngineKind, Precision, RunConfig
from unbroken.runs.engines import opened
from unbroken.runs.evaluation import Evaluation
from unbroken.runs.models import load_chat, load_policy, prepared
from unbroken.runs.progress import StepDisplay
from unbroken.runs.settings import describe
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.loop import train
from unbroken.training.metrics.writer import Metrics, MetricsWriter
from unbroken.training.model.sharding import keep_float32
from unbroken.training.trainer import Trainer


async def reinforce(config: RunConfig, *, model: str | Path, train_on: Problems, evaluate_on: Problems) -> None:
    """Train `model`, a folder or a hub name, and leave all there is to know of it in `config.output`.

        metrics/metrics.jsonl    a line for each step (and TensorBoard's events beside it)
        evaluation.jsonl         the mean reward before the first step and after the last
        checkpoints/             from which the run goes on when it is started again

    Raises:
        UnbrokenError: what the user can mend, with how.
    """
    accelerator = Accelerator(mixed_precision="bf16" if config.precision is Precision.BFLOAT16 else None)
    keep_float32(accelerator)
    check_copies(config.engine.kind, accelerator)
    share = Share(index=accelerator.process_index, num_processes=accelerator.num_processes)
    renderer = load_chat(model, config.renderer)
    policy = load_policy(model)
    output, num_steps = config.output, config.loop.num_steps
    async with opened(
        config.engine, model=policy, source=model, output=output, device=accelerator.device, share=share
    ) as found:
        seed = (config.seed, 0)
        sampler = Sampler(engine=found.engine, renderer=renderer, config=config.rollouts, problems=train_on, seed=seed)
        collect = Collector(sampler, share=share)
        evaluation = Evaluation(
            sampler=replace(sampler, problems=evaluate_on, seed=(config.seed, 1)),
            num_problems=config.evaluation.num_problems,
            output=output,
            share=share,
        )
        policy, reference = prepared(policy, config)
        trainer = Trainer(policy, config.loss, accelerator=accelerator, reference=reference)
        kept = config.checkpoints
        checkpoints = Checkpoints(output / "checkpoints", every=kept.every, num_kept=kept.num_kept, caller=collect)
        with StepDisplay(quiet=not accelerator.is_main_process) as display, ExitStack() as stack:
            metrics = None
            if accelerator.is_main_process:
                writer = MetricsWriter(output / "metrics", trackers=config.trackers, settings=describe(config))
                metrics = stack.enter_context(writer)

            def on_step(step: int, logged: Metrics) -> None:
                display.step(step, logged, num_steps=num_steps)

            display.tell("reward before", await evaluation.at(0))
            await train(
                collect,
                trainer=trainer,
                publisher=found.publisher,
                advantages=config.advantages,
                metrics=metrics,
                config=config.loop,
                on_step=on_step,
                checkpoints=checkpoints,
                engine=found.engine if config.engine.kind is EngineKind.SERVER else None,
                before_step=found.before_step,
            )
            display.tell("reward after", await evaluation.at(num_steps))


def check_copies(kind: EngineKind, accelerator: Accelerator) -> None:
    """Check that no process's engine is a copy of a model that it has not loaded.

    Raises:
        InvalidInputError: only the first process loads it, and each has an engine of its own.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if kind is EngineKind.EMBEDDED and plugin is not None and plugin.cpu_ram_efficient_loading:
        raise InvalidInputError(
            "engine.kind embedded copies the model that each process has loaded, and only the first loads any: give "
            "accelerate launch `--fsdp_cpu_ram_efficient_loading false`"
        )
