"""Open the sampler of a run on an engine that is open; evaluations sample their own problems with it.

Problems that agents attempt need a gateway, which is opened here too. With `rollouts.samplers` and `rollouts.listen`
groups are sampled in other processes. Each runs the recipe again up to `train_model`, so it has the problems, of
whatever they are made; renderer, connections and gateways it opens itself. The trainer's process asks for one group at
a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unbroken import __version__
from unbroken.engines.base import Engine, RequiresVersion
from unbroken.engines.directory import EngineDirectory
from unbroken.errors import InvalidInputError, missing_extra
from unbroken.images.processor import ImageInputs
from unbroken.ledger.store import is_postgres_url
from unbroken.rendering.base import Renderer
from unbroken.rendering.effects import check_tools_shown
from unbroken.rollout.agents.runner import SessionGateway
from unbroken.rollout.policies import PoliciesConfig
from unbroken.rollout.process.channel import Hello
from unbroken.rollout.process.pool import SamplerPool
from unbroken.rollout.process.worker import serve_orders
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.collector import Problems, Sampler, SamplesElsewhere
from unbroken.runs.config import EngineKind, RunConfig, parse_address, read_key
from unbroken.runs.engines import RunEngine, check_embedded, connect_servers
from unbroken.runs.folder import TEACHERS, digest_files, may_change, open_private
from unbroken.runs.models import (
    check_vocabulary,
    find_context_length,
    find_revision,
    load_config,
    load_image_inputs,
    load_model_renderer,
    locate,
)
from unbroken.runs.processes import SAMPLER_KEY, Rank, without_launcher
from unbroken.runs.recipe import OpenRecipe, Recipe, SamplerRole, Task, open_recipe
from unbroken.runs.settings import describe
from unbroken.training.waits import log_waiting
from unbroken.types import SamplingParams

_MAX_RETRIES = 12
"""A gateway that was killed may take a minute until it serves again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOpener:
    """Opens the sampler of one model for the problems of a run."""

    config: RunConfig
    source: str | Path
    """Where the model is loaded from."""
    train_on: Problems
    evaluate_on: Sequence[Problems]
    part: str
    """Names this process among those of the run: its rank, or its rank and which of its samplers."""

    def __post_init__(self) -> None:
        config = self.config
        if config.trainer.routing_replay and self.train_on.agent is not None:
            raise InvalidInputError(
                "trainer.routing_replay must be false for problems with agents, got true: sessions keep no experts"
            )
        if config.policies is not None:
            self._check_policies(config.policies)

    def _check_policies(self, policies: PoliciesConfig) -> None:
        """Raise `InvalidInputError` for problems that do not say who speaks, or whose rewards are nobody's."""
        names = list(policies.names)
        if _have_agents(self.problems):
            raise InvalidInputError(f"policies must be left out with agents, who name none, got {names}")
        if any(each.score is not None for each in self.problems):
            raise InvalidInputError(
                "rewards must be left out with policies, each of which has its own reward from the environment "
                f"(Env.reward), got reward functions of whole rollouts with {names}"
            )

    @property
    def problems(self) -> tuple[Problems, ...]:
        """All problems of the run: those to train on, then the sets of evaluations."""
        return (self.train_on, *self.evaluate_on)

    def identify(self, recipe: OpenRecipe) -> dict[str, str]:
        """What two processes must have in common to sample the same groups: values by what they are."""
        settings = {name: value for name, value in describe(self.config).items() if not may_change(name)}
        del settings["trainer.numerics"]  # auto here, and what the trainer chose there; samplers compute nothing by it
        found = {"the release": __version__, "the recipe": recipe.name}
        found |= {name: json.dumps(value) for name, value in settings.items()}
        # Samplers need no teachers: their folders may be on the trainer's machine alone.
        found |= digest_files({k: v for k, v in settings.items() if k != TEACHERS}, code=recipe.code)
        for k, each in enumerate(self.problems):
            kind = "environment" if each.agent is None else "agent"
            facts = [each.num_problems, each.source, kind, each.score is not None, each.has_images]
            found[f"{_name_problems(k)} (number, source, kind, scored as groups, images)"] = json.dumps(facts)
        return found

    def load_images(self) -> ImageInputs | None:
        """Load how the model takes images; raises as `load_image_inputs`."""
        prompts_have_images = any(each.has_images for each in self.problems)
        return load_image_inputs(self.source, self.config, prompts_have_images=prompts_have_images)

    def load_renderer(self, images: ImageInputs | None) -> Renderer:
        """Load the model's renderer.

        Raises:
            StopTokenError: no id ends a turn.
            ToolsNotShownError: the problems have tools that the renderer does not show.
            InvalidInputError, TemplateError: as `load_model_renderer`.
        """
        renderer = load_model_renderer(self.source, self.config.renderer, self.config.rollouts.sampling, images=images)
        renderer.get_stop_token_ids()
        if not self.config.rollouts.tools_in_messages:
            for each in self.problems:
                check_tools_shown(renderer, each.tools)
        return renderer

    def check_model(self, renderer: Renderer, images: ImageInputs | None) -> None:
        """Raise `InvalidInputError` for what the model or its engine cannot do, as far as the model's config says: its
        weights need not be there. Ids that it does not have, the embedded engine's limits, and turns or prompts of the
        data that the engine's context cannot hold.
        """
        model_config = load_config(self.source, self.config.model_settings)
        if model_config is not None:
            check_vocabulary(renderer, model_config)
            if self.config.engine.kind is EngineKind.EMBEDDED:
                check_embedded(self.config, model_config)
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
        renderer: Renderer,
        images: ImageInputs | None,
        elsewhere: SamplesElsewhere | None = None,
    ) -> Sampler:
        """Make the sampler, and open the gateway of problems with agents until the stack is closed.

        What samples `elsewhere` has its gateway there.
        """
        sampler = Sampler(
            engine=engine,
            renderer=renderer,
            config=self.config.rollouts,
            problems=self.train_on,
            seed=(self.config.seed, 0),
            returns_experts=self.config.trainer.routing_replay,
            elsewhere=elsewhere,
            policies=self.config.policies,
        )
        if elsewhere is None and _have_agents(self.problems):
            opening = _open_sessions(self.config, engine=engine, model=self.source, images=images, part=self.part)
            sampler = replace(sampler, sessions=await stack.enter_async_context(opening))
        return sampler


def _have_agents(problems: Sequence[Problems]) -> bool:
    return any(each.agent is not None for each in problems)


@asynccontextmanager
async def _open_sessions(
    config: RunConfig, *, engine: Engine, model: str | Path, images: ImageInputs | None, part: str
) -> AsyncIterator[SessionGateway]:
    """Open the gateway at `sessions.url`, or one in this process over its engine, until the block ends.

    Raises:
        InvalidInputError: the gateway's packages are not installed, or the key cannot be read.
        StoreError: the store cannot be opened.
    """
    try:
        from unbroken.client import AsyncClient
        from unbroken.gateway.app import create_gateway
        from unbroken.ledger.store import open_store
        from unbroken.rendering.encoding.text_codec import TextCodec
        from unbroken.rendering.loader import load_tokenizer
        from unbroken.server.config import ServerConfig
        from unbroken.server.process import host_app
    except ModuleNotFoundError as error:
        raise missing_extra(error, "agents need the serve extra", "serve") from error
    sessions = config.sessions
    async with AsyncExitStack() as stack:
        if sessions.url is not None:
            key = read_key(sessions.api_key_file, field="sessions.api_key_file")
            client = await stack.enter_async_context(AsyncClient(sessions.url, api_key=key, max_retries=_MAX_RETRIES))
            yield client.sessions
            return

        def make_renderer(options: Mapping[str, Any]) -> Renderer:
            template_kwargs = {**config.renderer.template_kwargs, **options}
            renderer = replace(config.renderer, template_kwargs=template_kwargs)
            return load_model_renderer(model, renderer, config.rollouts.sampling, images=images)

        key = secrets.token_urlsafe(24)
        app = create_gateway(
            engine,
            make_renderer,
            TextCodec(load_tokenizer(str(model))),
            ServerConfig(model_name="policy", tokenizer=locate(model), api_key=key),
            store=open_store(_locate_store(config, part)),
            image_processor=None if images is None else images.processor,
        )
        url = await stack.enter_async_context(host_app(app, host=sessions.host))
        client = await stack.enter_async_context(AsyncClient(url, api_key=key))
        yield client.sessions


def _locate_store(config: RunConfig, part: str) -> str:
    """Where the gateway of a process keeps its sessions: a folder is for one process, a database for all."""
    store = config.sessions.store
    if store is None:
        return str(config.output / "sessions" / f"process-{part}")
    return store if is_postgres_url(store) or not config.rollouts.has_samplers else str(Path(store) / part)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupOrder:
    """What to sample."""

    problems: int
    """Which of `SamplerOpener.problems`."""
    number: int
    size: int
    seed: tuple[int, ...]
    sampling: SamplingParams | None


@dataclass(frozen=True, slots=True)
class _NewestVersion:
    """The servers have these weights; see `RequiresVersion`."""

    policy_version: int


async def _start_child(words: Sequence[str], key: str, name: str, log: Path) -> asyncio.subprocess.Process:
    """Start a sampler of this machine, whose output goes into the log."""
    log.parent.mkdir(mode=0o700, exist_ok=True)
    with open_private(log, "ab") as output, without_launcher():
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "unbroken",
            "sampler",
            "--name",
            name,
            "--exit-with-parent",
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, SAMPLER_KEY: key, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C reaches only the trainer, which ends them
        )


class SamplerProcesses:
    """Samples groups in other processes. Made by `start`, then opened."""

    def __init__(self, pool: SamplerPool, opener: SamplerOpener, purpose: str) -> None:
        self._pool = pool
        self._problems = opener.problems
        self._purpose = purpose

    @classmethod
    async def start(cls, opener: SamplerOpener, rank: Rank) -> SamplerProcesses:
        """Start the samplers of this machine, and listen for others.

        Raises:
            InvalidInputError: samplers could not open the recipe, or this process cannot listen.
        """
        recipe, config = open_recipe.get(), opener.config
        if recipe is None or not recipe.words:
            raise InvalidInputError(
                "rollouts.samplers must be 0 and rollouts.listen left out in unbroken.fit and in a script that calls "
                "train_model itself: samplers open the recipe again, so start it with `unbroken train RECIPE`"
            )
        rollouts, key = config.rollouts, secrets.token_urlsafe(24)
        host, port = "127.0.0.1", 0
        if rollouts.listen is not None:
            host, port = parse_address(rollouts.listen, field="rollouts.listen")
            port, key = port + rank.index, read_key(rollouts.key_file, field="rollouts.key_file") or ""
        try:
            listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except (OSError, OverflowError) as error:
            raise InvalidInputError(
                f"rollouts.listen must be free on this machine, got {host}:{port}: {error}"
            ) from None
        port = listener.getsockname()[1]
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        logs = config.output / "samplers"
        pool = await SamplerPool.start(
            listener,
            key=key,
            identity=opener.identify(recipe),
            logs={f"{rank.index}-{k}": logs / f"{rank.index}-{k}.log" for k in range(rollouts.samplers)},
            start_local=partial(_start_child, ["--connect", f"{local}:{port}", *recipe.words], key),
        )
        purpose = f"a sampler to join at {host}:{port}"
        if rollouts.samplers:
            purpose = f"the samplers to start, whose output is in {logs}"
        return cls(pool, opener, purpose)

    async def open(self, engine: RunEngine) -> None:
        """Connect them to the servers that this engine is connected to; raises as `SamplerOpener` and its parts."""
        from unbroken.engines.http import HttpEngine

        async with log_waiting(self._purpose):
            await self._pool.open(engine.servers)
        assert isinstance(engine.engine, HttpEngine), "RunConfig has checked its kind"
        engine.engine.followers.append(self._tell_version)

    async def sample_group(self, sampler: Sampler, number: int, *, size: int) -> TrajectoryGroup:
        """Sample as `sampler` would in this process."""
        problems = next(k for k, each in enumerate(self._problems) if each is sampler.problems)
        order = _GroupOrder(problems=problems, number=number, size=size, seed=sampler.seed, sampling=sampler.sampling)
        return await self._pool.sample(order, name=f"problem {number} of {_name_problems(problems)}")

    async def close(self) -> None:
        """End them. Idempotent."""
        await self._pool.close()

    def _tell_version(self, policy_version: int) -> None:
        self._pool.tell(_NewestVersion, _NewestVersion(policy_version))


def _name_problems(index: int) -> str:
    return "the problems to train on" if index == 0 else f"evaluation set {index}"


async def run_as_sampler(config: RunConfig, task: Task, role: SamplerRole, recipe: Recipe) -> None:
    """Sample what the trainer's process orders, until it ends; raises as `serve_orders`."""
    torch.set_num_threads(1)  # there are as many processes as there is work
    source = find_revision(task.model, config.model_settings.revision)
    others = [each.problems for each in task.sets]
    opener = SamplerOpener(config=config, source=source, train_on=task.train_on, evaluate_on=others, part=role.name)
    opened = OpenRecipe(name=recipe.name, words=(), code=recipe.code)
    await serve_orders(
        role.address,
        key=role.key,
        hello=Hello(role.name, opener.identify(opened)),
        open_work=partial(_open_work, opener),
        wait_s=role.wait_s,
    )


class _Work:
    """See `unbroken.rollout.process.worker.Work`."""

    def __init__(self, opener: SamplerOpener, sampler: Sampler) -> None:
        self._problems = opener.problems
        self._sampler = sampler

    async def sample(self, order: _GroupOrder) -> TrajectoryGroup:
        problems = self._problems[order.problems]
        sampler = replace(self._sampler, problems=problems, seed=order.seed, sampling=order.sampling)
        return await sampler.sample_group(order.number, size=order.size)

    def tell(self, news: _NewestVersion) -> None:
        engine = self._sampler.engine
        assert isinstance(engine, RequiresVersion), "it is connected to servers"
        engine.require_version(news.policy_version)


@asynccontextmanager
async def _open_work(opener: SamplerOpener, servers: Sequence[str] | EngineDirectory) -> AsyncIterator[_Work]:
    async with AsyncExitStack() as stack:
        images = opener.load_images()
        renderer = opener.load_renderer(images)
        engine = await connect_servers(stack, opener.config.engine, servers)
        sampler = await opener.open(stack, engine=engine, renderer=renderer, images=images)
        print(f"sampler {opener.part} is ready", flush=True)
        yield _Work(opener, sampler)
