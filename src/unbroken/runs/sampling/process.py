"""The process of its own in which a run's groups are sampled (`rollouts.own_process`).

It is forked before engines, model and trainer are opened, so it has the problems, whatever they are made of. Renderer,
connections and gateways it opens itself. The trainer's process asks it for one group at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from unbroken.engines.base import RequiresVersion
from unbroken.rollout.process.process import RolloutProcess
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.collector import Sampler
from unbroken.runs.engines import connect_servers
from unbroken.runs.sampling.opening import SamplerOpener, Samplers
from unbroken.runs.shared_engine import RunEngine
from unbroken.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """The addresses of the servers, which are known once they have started."""

    training: tuple[str, ...]
    evaluation: tuple[str, ...]
    """Empty where evaluations have no servers of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """What to sample."""

    is_evaluation: bool
    problems: int
    """Which of `SamplerOpener.problems`."""
    number: int
    size: int
    seed: tuple[int, ...]
    sampling: SamplingParams | None


@dataclass(frozen=True, slots=True)
class NewestVersion:
    """The servers of training, or of evaluations, have these weights; see `RequiresVersion`."""

    is_evaluation: bool
    policy_version: int


class SamplingProcess:
    """Samples groups in a process of its own. Made by `fork`, then opened."""

    def __init__(self, process: RolloutProcess, opener: SamplerOpener) -> None:
        self._process = process
        self._problems = opener.problems
        self._evaluation_engine: Any = None

    @classmethod
    def fork(cls, opener: SamplerOpener) -> SamplingProcess:
        """Fork the process; raises as `RolloutProcess.fork`."""
        return cls(RolloutProcess.fork(lambda servers: _open_work(opener, servers)), opener)

    async def open(self, engine: RunEngine, evaluation_engine: RunEngine | None) -> None:
        """Connect it to the servers that these engines are connected to; raises as `SamplerOpener` and its parts."""
        urls = () if evaluation_engine is None else evaluation_engine.urls
        await self._process.open(Servers(training=engine.urls, evaluation=urls))
        _follow(engine, partial(self._tell_version, False))
        if evaluation_engine is not None:
            self._evaluation_engine = evaluation_engine.engine
            _follow(evaluation_engine, partial(self._tell_version, True))

    async def sample_group(self, sampler: Sampler, number: int, *, size: int) -> TrajectoryGroup:
        """Sample as `sampler` would in this process."""
        problems = next(k for k, each in enumerate(self._problems) if each is sampler.problems)
        return await self._process.sample(
            GroupOrder(
                is_evaluation=self._evaluation_engine is not None and sampler.engine is self._evaluation_engine,
                problems=problems,
                number=number,
                size=size,
                seed=sampler.seed,
                sampling=sampler.sampling,
            )
        )

    async def close(self) -> None:
        """End the process."""
        await self._process.close()

    def _tell_version(self, is_evaluation: bool, policy_version: int) -> None:
        self._process.tell(NewestVersion(is_evaluation, policy_version))


def _follow(engine: RunEngine, follower: Callable[[int], None]) -> None:
    from unbroken.engines.http import HttpEngine

    assert isinstance(engine.engine, HttpEngine), "RunConfig has checked its kind"
    engine.engine.followers.append(follower)


class _Work:
    """See `unbroken.rollout.process.worker.Work`."""

    def __init__(self, opener: SamplerOpener, samplers: Samplers) -> None:
        self._problems = opener.problems
        self._samplers = samplers

    async def sample(self, order: GroupOrder) -> TrajectoryGroup:
        sampler = self._samplers.get(is_evaluation=order.is_evaluation)
        sampler = replace(sampler, problems=self._problems[order.problems], seed=order.seed, sampling=order.sampling)
        return await sampler.sample_group(order.number, size=order.size)

    def tell(self, news: NewestVersion) -> None:
        engine = self._samplers.get(is_evaluation=news.is_evaluation).engine
        assert isinstance(engine, RequiresVersion), "it is connected to servers"
        engine.require_version(news.policy_version)


@asynccontextmanager
async def _open_work(opener: SamplerOpener, servers: Servers) -> AsyncIterator[_Work]:
    torch.set_num_threads(1)  # the others are not in a forked process
    async with AsyncExitStack() as stack:
        images = opener.load_images()
        renderer = opener.load_renderer(images)
        engine = await connect_servers(stack, opener.config.engine, servers.training)
        evaluation_engine = None
        if opener.config.evaluation.engine is not None:
            choice = opener.config.evaluation.engine
            evaluation_engine = await connect_servers(stack, choice, servers.evaluation, name="evaluation.engine")
        samplers = await opener.open(
            stack, engine=engine, evaluation_engine=evaluation_engine, renderer=renderer, images=images
        )
        yield _Work(opener, samplers)
