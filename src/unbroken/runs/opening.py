"""Open a run: its processes, model, engine, sampler and trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from unbroken.errors import InvalidInputError
from unbroken.exactness import fix_rotary
from unbroken.runs.collector import Problems, Sampler
from unbroken.runs.config import EngineKind, Precision, RunConfig
from unbroken.runs.engines import open_engine
from unbroken.runs.models import check_config_changes, find_revision, load_model, locate, prepare_model
from unbroken.runs.processes import Rank, join_processes, uses_cpu
from unbroken.runs.sampling.opening import SamplerOpener
from unbroken.runs.sampling.process import SamplingProcess
from unbroken.runs.shared_engine import RunEngine
from unbroken.training.model.sharding import keep_float32
from unbroken.training.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """What a run samples and trains with."""

    source: str
    """Where the model was loaded from: an absolute path, or a name on the hub."""
    rank: Rank
    engine: RunEngine
    sampler: Sampler
    """Samples the problems to train on."""
    evaluation_engine: RunEngine | None
    """The servers of `evaluation.engine`."""
    evaluation_sampler: Sampler
    """With the engine of evaluations."""
    trainer: Trainer
    model: Any
    """The trainer's."""


def join_accelerator(config: RunConfig, accelerator: Accelerator | None) -> Accelerator:
    """Join the run's processes, and make the accelerator unless one is given.

    Raises:
        InvalidInputError: the processes were not started in a way that this run supports.
    """
    join_processes()
    accelerator = accelerator or Accelerator(
        cpu=uses_cpu(), mixed_precision="bf16" if config.precision is Precision.BFLOAT16 else None
    )
    keep_float32(accelerator)
    check_model_copies(config.engine.kind, accelerator)
    return accelerator


def check_model_copies(kind: EngineKind, accelerator: Accelerator) -> None:
    """Raise `InvalidInputError` if a process cannot have an engine of this kind: it has no GPU, or no model."""
    if kind is EngineKind.COLOCATED and accelerator.device.type == "cpu" and not _has_vllm_for_cpu():
        raise InvalidInputError(
            "engine.kind colocated needs a GPU, or vLLM's build for CPUs, and there is neither: take embedded"
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if kind is EngineKind.EMBEDDED and plugin is not None and plugin.cpu_ram_efficient_loading:
        raise InvalidInputError(
            "engine.kind embedded needs the model in every process, but only the first one loads it: give "
            "accelerate launch `--fsdp_cpu_ram_efficient_loading false`"
        )


def _has_vllm_for_cpu() -> bool:
    return any("cpu" in f"{name} {version(name)}" for name in packages_distributions().get("vllm", ()))


@asynccontextmanager
async def open_run(
    config: RunConfig,
    *,
    model: str | Path,
    train_on: Problems,
    evaluate_on: Sequence[Problems],
    accelerator: Accelerator,
) -> AsyncIterator[OpenRun]:
    """Load `model`, open its engine, and a gateway if problems have agents; make the sampler and the trainer.

    Engine and gateway are closed when the block ends.
    """
    model = find_revision(model, config.model_settings.revision)
    check_config_changes(model, config)
    rank = Rank(index=accelerator.process_index, num_processes=accelerator.num_processes)
    samplers = SamplerOpener(config=config, source=model, train_on=train_on, evaluate_on=evaluate_on, rank=rank)
    samplers.check()
    async with AsyncExitStack() as stack:
        process: SamplingProcess | None = None
        if config.rollouts.own_process:
            process = SamplingProcess.fork(samplers)
            stack.push_async_callback(process.close)
        images = samplers.load_images()
        renderer = samplers.load_renderer(images)
        samplers.check_lengths(renderer, images)
        policy = load_model(model, config.model_settings, takes_images=images is not None)
        processor = None if images is None else images.processor
        open_one = partial(
            open_engine,
            model=policy,
            source=model,
            output=config.output,
            device=accelerator.device,
            rank=rank,
            image_processor=processor,
        )
        engine = await stack.enter_async_context(
            open_one(config.engine, adapter_rank=config.adapter_rank, records_routing=config.trainer.routing_replay)
        )
        evaluation_engine: RunEngine | None = None
        if config.evaluation.engine is not None:
            opening = open_one(config.evaluation.engine, name="evaluation.engine")
            evaluation_engine = await stack.enter_async_context(opening)
        for each in (engine, evaluation_engine):  # the engine's rule is that of trainer, reference and evaluations
            if each is not None:
                fix_rotary(policy, each.engine.context_length)
        if process is not None:
            await process.open(engine, evaluation_engine)
            stack.push_async_callback(process.close)  # before its servers
        opened = await samplers.open(
            stack,
            engine=engine.engine,
            evaluation_engine=None if evaluation_engine is None else evaluation_engine.engine,
            renderer=renderer,
            images=images,
            elsewhere=process,
        )
        # The engine has its copy by now: adapters are added to the model itself.
        policy, reference = prepare_model(policy, config)
        trainer = Trainer(
            policy,
            config.training,
            objective=config.objective,
            accelerator=accelerator,
            images=processor,
            reference=reference,
        )
        yield OpenRun(
            source=locate(model),
            rank=rank,
            engine=engine,
            sampler=opened.training,
            evaluation_engine=evaluation_engine,
            evaluation_sampler=opened.evaluation,
            trainer=trainer,
            model=policy,
        )
