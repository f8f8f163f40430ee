"""The engine of a run, opened and closed with it, and how new weights get there."""

from __future__ import annotations

import copy
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from unbroken.engines.base import Engine
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import EngineError, InvalidInputError
from unbroken.runs.collector import Share
from unbroken.runs.config import EngineConfig, EngineKind, WeightTransport
from unbroken.runs.serving import started
from unbroken.training.checks import check_vocabulary
from unbroken.training.loop import BeforeStep
from unbroken.weights.base import WeightPublisher
from unbroken.weights.in_process import InProcessPublisher


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEngine:
    """What samples, and what gives it weights."""

    engine: Engine
    publisher: WeightPublisher | None
    """None in a process for whose engine another one does it."""
    before_step: BeforeStep | None = None
    """What lets the trainer have the engine's memory."""


@asynccontextmanager
async def opened(
    config: EngineConfig, *, model: Any, source: str | Path, output: Path, device: Any, share: Share
) -> AsyncIterator[OpenEngine]:
    """The engine of a run on `model`, which is loaded from `source`; closed behind the block.

    Of several processes each has an embedded engine of its own; servers are started by the first, get their weights
    from the first, and are sampled from by all.

    Raises:
        InvalidInputError: the engine's vocabulary is not the model's.
        EngineError: a server does not start, cannot be reached, or serves another model than the others.
    """
    weights = output / "weights" if config.weights_dir is None else config.weights_dir
    async with AsyncExitStack() as stack:
        if config.kind is EngineKind.EMBEDDED:
            engine = TransformersEngine(copy.deepcopy(model).to(device), config=config.embedded)
            stack.push_async_callback(engine.close)
            found = OpenEngine(engine=engine, publisher=InProcessPublisher(engine))
        elif config.kind is EngineKind.COLOCATED:
            found = await stack.enter_async_context(_colocated(config, source, share))
        else:
            urls = config.urls
            if config.kind is EngineKind.STARTED:
                server = started(_serve_command(config, source, weights), output / "server.log")
                urls = await _one_started(stack, server, share)
            found = await stack.enter_async_context(_connected(urls, config, weights, share, device))
        check_vocabulary(found.engine, len(model.get_input_embeddings().weight))
        yield found


@asynccontextmanager
async def _colocated(config: EngineConfig, source: str | Path, share: Share) -> AsyncIterator[OpenEngine]:
    """vLLM, which sleeps during the steps. On a CPU it only stands still: vLLM has no sleep mode there."""
    if share.num_processes > 1:
        raise InvalidInputError(
            f"engine.kind colocated takes one trainer process, got {share.num_processes}: each would start vLLM on the "
            "first GPU"
        )
    try:
        from unbroken.engines.vllm import VllmEngine, parse_engine_args
    except ModuleNotFoundError as error:
        raise InvalidInputError(f"engine.kind colocated needs vLLM: pip install 'unbroken[vllm]' ({error})") from None
    sleep = ["--enable-sleep-mode"] if torch.cuda.is_available() else []
    engine = await VllmEngine.start(parse_engine_args(["--model", str(source), *sleep, *config.vllm_options]))
    try:
        yield OpenEngine(engine=engine, publisher=InProcessPublisher(engine), before_step=engine.sleep)
    finally:
        await engine.close()


@asynccontextmanager
async def _connected(
    urls: tuple[str, ...], config: EngineConfig, weights: Path, share: Share, device: Any
) -> AsyncIterator[OpenEngine]:
    try:
        from unbroken.client import AsyncClient
        from unbroken.engines.http import HttpEngine
        from unbroken.weights.collective import CollectivePublisher
        from unbroken.weights.disk import DiskPublisher
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"engine.kind {config.kind} needs the client extra: pip install 'unbroken[client]' ({error})"
        ) from None
    async with AsyncExitStack() as stack:
        key = None if config.api_key_file is None else _key_in(config.api_key_file)
        engine = await HttpEngine.connect(urls, api_key=key, wait_s=config.wait_s)
        stack.push_async_callback(engine.close)
        publisher: WeightPublisher | None = None
        if share.index == 0:
            clients = [await stack.enter_async_context(AsyncClient(url, api_key=key)) for url in urls]
            if config.transport is WeightTransport.FILES:
                publisher = DiskPublisher(clients, weights)
            else:
                publisher = CollectivePublisher(clients, host=config.host, device=device.type)
                stack.callback(publisher.close)
        yield OpenEngine(engine=engine, publisher=publisher)


async def _one_started(stack: AsyncExitStack, server: AbstractAsyncContextManager[str], share: Share) -> tuple[str]:
    """The URL of the server that the first process starts, for all of them; where it does not start, all hear it."""
    url, refused = "", None
    try:
        if share.index == 0:
            url = await stack.enter_async_context(server)
    except EngineError as error:
        refused = str(error)
    url, refused = gather_object([(url, refused)])[0]
    if refused is not None:
        raise EngineError(refused)
    return (url,)


def _serve_command(config: EngineConfig, source: str | Path, weights: Path) -> list[str]:
    return [
        sys.executable, "-m", "unbroken", "serve", "--model", str(source), "--port", "0",
        "--weights-dir", str(weights), "--exit-with-parent", *config.serve_options,
    ]  # fmt: skip


def _key_in(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError as error:
        raise InvalidInputError(f"engine.api_key_file must be a file with the key: {error}") from None
