"""One engine over the GPUs of several processes: the first of them hosts it, and all sample through its server.

    process 0                                                                      process 1
      thread: vLLM, tensor-parallel over GPUs 0 and 1 ◄── server on the loopback ◄── HttpEngine
        ▲ new weights, sleep                                 ▲
      trainer                                              HttpEngine              trainer

The engine has a thread with an event loop of its own: a process that waits for the others blocks its loop, while they
still sample. vLLM's own way to run in several processes (`external_launcher`) needs the same requests in the same order
in each, which rollouts with tools do not have.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object

from unbroken.engines.base import Engine, SleepingEngine
from unbroken.errors import missing_extra
from unbroken.images.processor import ImageProcessor
from unbroken.integrations.renderers.registry import load_renderer
from unbroken.rendering.loader import load_tokenizer
from unbroken.runs.processes import Rank
from unbroken.threads import LoopThread
from unbroken.training.model.sharding import fail_together, on_device
from unbroken.weights.base import WeightPublisher, WeightUpdate
from unbroken.weights.in_process import InProcessPublisher

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEngine:
    """The engine of a run, and its publisher."""

    engine: Engine
    publisher: WeightPublisher | None
    """None in a process whose engine gets its weights from another process."""
    before_update: Callable[[], Awaitable[None]] | None = None
    """Frees the engine's memory for the trainer."""
    urls: tuple[str, ...] = ()
    """The servers behind the engine, if there are any."""


class EngineHost:
    """An engine and its server in a thread; a publisher for it."""

    def __init__(self, source: str | Path, processor: ImageProcessor | None) -> None:
        self.key = secrets.token_urlsafe(24)
        self.url = ""
        self._source = source
        self._processor = processor
        self._thread = LoopThread()
        self._stack = AsyncExitStack()
        self._engine: SleepingEngine | None = None

    async def open(self, start: Callable[[], Awaitable[SleepingEngine]]) -> None:
        """Start the engine and its server; raises as `start`, and then nothing is left."""
        try:
            await self._thread.call(self._open(start))
        except BaseException:
            await self.close()
            raise

    async def publish(self, named_parameters: Iterable[tuple[str, Any]], *, policy_version: int) -> WeightUpdate:
        assert self._engine is not None
        publisher = InProcessPublisher(self._engine)
        return await self._thread.call(publisher.publish(named_parameters, policy_version=policy_version))

    async def sleep(self) -> None:
        assert self._engine is not None
        await self._thread.call(self._engine.sleep())

    async def close(self) -> None:
        """End the server, the engine and the thread."""
        await self._thread.call(self._stack.aclose())
        self._thread.close()

    async def _open(self, start: Callable[[], Awaitable[SleepingEngine]]) -> None:
        from unbroken.rendering.encoding.text_codec import TextCodec
        from unbroken.server.app import create_app
        from unbroken.server.config import ServerConfig
        from unbroken.server.process import host_app

        self._engine = await start()
        self._stack.push_async_callback(self._engine.close)
        app = create_app(
            self._engine,
            # For paths that take text, which these processes do not use.
            lambda options: load_renderer(str(self._source), template_kwargs=options),
            TextCodec(load_tokenizer(str(self._source))),
            ServerConfig(model_name="policy", api_key=self.key),
            image_processor=self._processor,
        )
        self.url = await self._stack.enter_async_context(host_app(app))


@asynccontextmanager
async def share_engine(
    start: Callable[[], Awaitable[SleepingEngine]],
    *,
    source: str | Path,
    rank: Rank,
    size: int,
    device: torch.device,
    processor: ImageProcessor | None = None,
) -> AsyncIterator[RunEngine]:
    """Start an engine in each `size`-th process, and connect it and those after it to the engine.

    All processes of the run enter the block together. The process that hosts an engine sends it weights and lets it
    sleep; the others have no publisher. If a process fails to start or to connect, all raise.

    Raises:
        InvalidInputError: packages of the server or its client are not installed.
        TrainingError: another process failed.
    """
    try:
        importlib.import_module("unbroken.server.process")
        from unbroken.engines.http import HttpEngine
    except ModuleNotFoundError as error:
        raise missing_extra(error, "engine.processes_per_engine above 1 needs the serve extra", "serve") from error
    first = rank.index // size * size
    async with AsyncExitStack() as stack:
        host: EngineHost | None = None
        with fail_together(device):
            if rank.index == first:
                host = EngineHost(source, processor)
                await host.open(start)
                stack.push_async_callback(host.close)
        with on_device(device):
            url, key = gather_object([(host.url, host.key) if host is not None else ("", "")])[first]
        with fail_together(device):
            engine = await HttpEngine.connect((url,), api_key=key)
            stack.push_async_callback(engine.close)
        yield RunEngine(engine=engine, publisher=host, before_update=None if host is None else host.sleep)
