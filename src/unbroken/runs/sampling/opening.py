"""Open the samplers of a run, on engines that are open: that of the problems to train on, and that of evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from unbroken.engines.base import Engine
from unbroken.errors import InvalidInputError
from unbroken.images.processor import ImageInputs
from unbroken.rendering.base import Renderer
from unbroken.rollout.agents.runner import SessionGateway
from unbroken.runs.collector import Problems, Sampler, SamplesElsewhere
from unbroken.runs.config import RunConfig
from unbroken.runs.models import find_context_length, load_image_inputs, load_model_renderer
from unbroken.runs.processes import Rank
from unbroken.runs.sessions import open_sessions
from unbroken.runs.settings import redact


@dataclass(frozen=True, slots=True, kw_only=True)
class Samplers:
    """The samplers of a process."""

    training: Sampler
    evaluation: Sampler

    def get(self, *, is_evaluation: bool) -> Sampler:
        """That of evaluations, or that of training."""
        return self.evaluation if is_evaluation else self.training


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOpener:
    """Opens samplers of one model for the problems of a run."""

    config: RunConfig
    source: str | Path
    """Where the model is loaded from."""
    train_on: Problems
    evaluate_on: Sequence[Problems]
    rank: Rank

    @property
    def problems(self) -> tuple[Problems, ...]:
        """All problems of the run: those to train on, then the sets of evaluations."""
        return (self.train_on, *self.evaluate_on)

    def check(self) -> None:
        """Raise `InvalidInputError` if the run cannot have these problems with agents."""
        config = self.config
        if config.trainer.routing_replay and self.train_on.agent is not None:
            raise InvalidInputError(
                "trainer.routing_replay must be false for problems with agents, got true: sessions keep no experts"
            )
        has_own_engine = config.evaluation.engine is not None
        if has_own_engine and _have_agents(self.evaluate_on) and (config.sessions.url or config.sessions.store):
            raise InvalidInputError(
                "evaluation.engine with agents must have sessions.url and sessions.store left out, because evaluations "
                f"get a gateway and a store of their own, got {redact([config.sessions.url, config.sessions.store])}"
            )

    def load_images(self) -> ImageInputs | None:
        """Load how the model takes images; raises as `load_image_inputs`."""
        prompts_have_images = any(each.has_images for each in self.problems)
        return load_image_inputs(self.source, self.config, prompts_have_images=prompts_have_images)

    def load_renderer(self, images: ImageInputs | None) -> Renderer:
        """Load the model's renderer; raises as `load_model_renderer`, and `StopTokenError` if no id ends a turn."""
        renderer = load_model_renderer(self.source, self.config.renderer, self.config.rollouts.sampling, images=images)
        renderer.get_stop_token_ids()
        return renderer

    def check_lengths(self, renderer: Renderer, images: ImageInputs | None) -> None:
        """Raise `InvalidInputError` for a turn or a prompt of the data that the engine's context cannot hold."""
        length = find_context_length(self.source, self.config.engine)
        if length is None:
            return
        if (most := self.config.rollouts.sampling.max_tokens) > length:
            raise InvalidInputError(
                f"rollouts.sampling.max_tokens must be at most {length}, the context of the model and its engine, got "
                f"{most}"
            )
        for each in self.problems:
            if each.check_prompts is not None:
                each.check_prompts(renderer, length, images)

    async def open(
        self,
        stack: AsyncExitStack,
        *,
        engine: Engine,
        evaluation_engine: Engine | None,
        renderer: Renderer,
        images: ImageInputs | None,
        elsewhere: SamplesElsewhere | None = None,
    ) -> Samplers:
        """Make the samplers, and open the gateways of problems with agents until the stack is closed.

        Without an engine of their own, evaluations have that of training. What samples `elsewhere` has gateways there.
        """
        sampler = Sampler(
            engine=engine,
            renderer=renderer,
            config=self.config.rollouts,
            problems=self.train_on,
            seed=(self.config.seed, 0),
            returns_experts=self.config.trainer.routing_replay,
            elsewhere=elsewhere,
        )
        if elsewhere is None and _have_agents(self.problems):
            sampler = replace(sampler, sessions=await self._open_sessions(stack, self.config, engine, images))
        if evaluation_engine is None:
            return Samplers(training=sampler, evaluation=sampler)
        sessions = sampler.sessions
        if elsewhere is None and _have_agents(self.evaluate_on):
            store = str(self.config.output / "sessions" / f"evaluation-{self.rank.index}")
            own = replace(self.config, sessions=replace(self.config.sessions, store=store))
            sessions = await self._open_sessions(stack, own, evaluation_engine, images)
        moved = replace(sampler, engine=evaluation_engine, sessions=sessions, returns_experts=False)
        return Samplers(training=sampler, evaluation=moved)

    async def _open_sessions(
        self, stack: AsyncExitStack, config: RunConfig, engine: Engine, images: ImageInputs | None
    ) -> SessionGateway:
        opening = open_sessions(config, engine=engine, model=self.source, images=images, rank=self.rank)
        return await stack.enter_async_context(opening)


def _have_agents(problems: Sequence[Problems]) -> bool:
    return any(each.agent is not None for each in problems)
