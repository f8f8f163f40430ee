"""Open a run: its processes, model, engine, sampler and trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from unbroken.errors import InvalidInputError
from unbroken.runs.collector import Problems, Sampler
from unbroken.runs.config import EngineKind, Precision, RunConfig
from unbroken.runs.engines import open_engine
from unbroken.runs.models import load_image_inputs, load_model, load_model_renderer, locate, prepare_model
from unbroken.runs.processes import Rank, join_processes, uses_cpu
from unbroken.runs.sessions import open_sessions
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
    """Raise `InvalidInputError` if each process has its own engine, but only the first one loads the model."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if kind is EngineKind.EMBEDDED and plugin is not None and plugin.cpu_ram_efficient_loading:
        raise InvalidInputError(
            "engine.kind embedded needs the model in every process, but only the first one loads it: give "
            "accelerate launch `--fsdp_cpu_ram_efficient_loading false`"
        )


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
    problems = (train_on, *evaluate_on)
    if config.trainer.routing_replay and train_on.agent is not None:
        raise InvalidInputError(
            "trainer.routing_replay must be false for problems with agents, got true: sessions keep no experts"
        )
    evaluates_agents = any(each.agent is not None for each in evaluate_on)
    if config.evaluation.engine is not None and evaluates_agents and (config.sessions.url or config.sessions.store):
        raise InvalidInputError(
            "evaluation.engine with agents must have sessions.url and sessions.store left out, because evaluations get "
            f"a gateway and a store of their own, got {config.sessions.url!r} and {config.sessions.store!r}"
        )
    images = load_image_inputs(model, config, prompts_have_images=any(each.has_images for each in problems))
    processor = None if images is None else images.processor
    renderer = load_model_renderer(model, config.renderer, images=images)
    policy = load_model(model, takes_images=images is not None)
    rank = Rank(index=accelerator.process_index, num_processes=accelerator.num_processes)
    async with AsyncExitStack() as stack:
        opening = open_engine(
            config.engine,
            model=policy,
            source=model,
            output=config.output,
            device=accelerator.device,
            rank=rank,
            image_processor=processor,
            adapter_rank=config.adapter_rank,
            records_routing=config.trainer.routing_replay,
        )
        engine = await stack.enter_async_context(opening)
        sessions = None
        if any(each.agent is not None for each in problems):
            gateway = open_sessions(config, engine=engine.engine, model=model, images=images, rank=rank)
            sessions = await stack.enter_async_context(gateway)
        sampler = Sampler(
            returns_experts=config.trainer.routing_replay,
            engine=engine.engine,
            renderer=renderer,
            config=config.rollouts,
            problems=train_on,
            seed=(config.seed, 0),
            sessions=sessions,
        )
        evaluation_engine, evaluation_sampler = None, sampler
        if config.evaluation.engine is not None:
            opening = open_engine(
                config.evaluation.engine,
                model=policy,
                source=model,
                output=config.output,
                device=accelerator.device,
                rank=rank,
                image_processor=processor,
                name="evaluation.engine",
            )
            evaluation_engine = await stack.enter_async_context(opening)
            if evaluates_agents:
                store = str(config.output / "sessions" / f"evaluation-{rank.index}")
                own = replace(config, sessions=replace(config.sessions, store=store))
                gateway = open_sessions(own, engine=evaluation_engine.engine, model=model, images=images, rank=rank)
                sessions = await stack.enter_async_context(gateway)
            evaluation_sampler = replace(
                sampler, engine=evaluation_engine.engine, sessions=sessions, returns_experts=False
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
            sampler=sampler,
            evaluation_engine=evaluation_engine,
            evaluation_sampler=evaluation_sampler,
            trainer=trainer,
            model=policy,
        )
