"""Open a run: its processes, model, engine, sampler and trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from unbroken.errors import InvalidInputError
from unbroken.images.inputs import ImageInputs
from unbroken.images.processing import ImageProcessor
from unbroken.rollout.agents.runner import SessionGateway
from unbroken.runs.collector import Problems, Sampler
from unbroken.runs.config import EngineConfig, EngineKind, Precision, RunConfig
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
    _check_agents(config, train_on, evaluate_on)
    problems = (train_on, *evaluate_on)
    images = load_image_inputs(model, config, prompts_have_images=any(each.has_images for each in problems))
    renderer = load_model_renderer(model, config.renderer, images=images)
    policy = load_model(model, takes_images=images is not None)
    rank = Rank(index=accelerator.process_index, num_processes=accelerator.num_processes)
    async with AsyncExitStack() as stack:
        opener = _Opener(
            config=config, source=model, model=policy, images=images, device=accelerator.device, rank=rank, stack=stack
        )
        engine = await opener.open_engine(
            config.engine, adapter_rank=config.adapter_rank, records_routing=config.trainer.routing_replay
        )
        sampler = Sampler(
            returns_experts=config.trainer.routing_replay,
            engine=engine.engine,
            renderer=renderer,
            config=config.rollouts,
            problems=train_on,
            seed=(config.seed, 0),
            sessions=await opener.open_sessions(config, engine) if _have_agents(problems) else None,
        )
        evaluation_engine, evaluation_sampler = None, sampler
        if config.evaluation.engine is not None:
            evaluation_engine = await opener.open_engine(config.evaluation.engine, name="evaluation.engine")
            evaluation_sampler = await opener.move_sampler(sampler, evaluation_engine, evaluate_on)
        # The engine has its copy by now: adapters are added to the model itself.
        policy, reference = prepare_model(policy, config)
        trainer = Trainer(
            policy,
            config.training,
            objective=config.objective,
            accelerator=accelerator,
            images=opener.image_processor,
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


def _have_agents(problems: Sequence[Problems]) -> bool:
    return any(each.agent is not None for each in problems)


def _check_agents(config: RunConfig, train_on: Problems, evaluate_on: Sequence[Problems]) -> None:
    if config.trainer.routing_replay and train_on.agent is not None:
        raise InvalidInputError(
            "trainer.routing_replay must be false for problems with agents, got true: sessions keep no experts"
        )
    has_own_engine = config.evaluation.engine is not None
    if has_own_engine and _have_agents(evaluate_on) and (config.sessions.url or config.sessions.store):
        raise InvalidInputError(
            "evaluation.engine with agents must have sessions.url and sessions.store left out, because evaluations get "
            f"a gateway and a store of their own, got {config.sessions.url!r} and {config.sessions.store!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opener:
    """Opens engines and gateways of one model, until `stack` is closed."""

    config: RunConfig
    source: str | Path
    """Where the model was loaded from."""
    model: Any
    images: ImageInputs | None
    device: torch.device
    rank: Rank
    stack: AsyncExitStack

    @property
    def image_processor(self) -> ImageProcessor | None:
        """The processor of `images`."""
        return None if self.images is None else self.images.processor

    async def open_engine(self, choice: EngineConfig, **options: Any) -> RunEngine:
        """Open an engine, with these further options of `engines.open_engine`."""
        opening = open_engine(
            choice,
            model=self.model,
            source=self.source,
            output=self.config.output,
            device=self.device,
            rank=self.rank,
            image_processor=self.image_processor,
            **options,
        )
        return await self.stack.enter_async_context(opening)

    async def open_sessions(self, config: RunConfig, engine: RunEngine) -> SessionGateway:
        """Open the gateway of an engine."""
        opening = open_sessions(config, engine=engine.engine, model=self.source, images=self.images, rank=self.rank)
        return await self.stack.enter_async_context(opening)

    async def move_sampler(self, sampler: Sampler, engine: RunEngine, evaluate_on: Sequence[Problems]) -> Sampler:
        """The sampler with the engine of evaluations, and for agents with a gateway of that engine."""
        sessions = sampler.sessions
        if _have_agents(evaluate_on):
            store = str(self.config.output / "sessions" / f"evaluation-{self.rank.index}")
            own = replace(self.config, sessions=replace(self.config.sessions, store=store))
            sessions = await self.open_sessions(own, engine)
        return replace(sampler, engine=engine.engine, sessions=sessions, returns_experts=False)
