"""Open the engine of a run, with the publisher that gives it new weights: in this process, on its GPU, or in a server.

One engine over the GPUs of several processes (`processes_per_engine`): the first of them hosts it, and all sample
through its server.

    process 0                                                                      process 1
      thread: vLLM, tensor-parallel over GPUs 0 and 1 ◄── server on the loopback ◄── HttpEngine
        ▲ new weights, sleep                                 ▲
      trainer                                              HttpEngine              trainer

The engine has a thread with its own event loop: a process that waits for the others blocks its loop, while they
still sample. vLLM's own way to run in several processes (`external_launcher`) needs the same requests in the same order
in each, which rollouts with tools do not have.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import os
import re
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from accelerate.utils import gather_object

from unbroken.engines.base import AdapterRoom, Engine, SleepingEngine
from unbroken.engines.checks import describe_numerics
from unbroken.engines.directory import EngineDirectory, FileDirectory, follow
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import EngineError, InvalidInputError, ServerUnreachableError, missing_extra
from unbroken.images.processor import ImageProcessor
from unbroken.rendering.loader import load_renderer, load_tokenizer
from unbroken.rollout.policies import PoliciesConfig
from unbroken.runs.config import EngineConfig, EngineKind, RunConfig, WeightTransport, read_key
from unbroken.runs.folder import open_private
from unbroken.runs.processes import Rank, find_own_address, without_launcher
from unbroken.server.config import ServerLimits
from unbroken.threads import LoopThread
from unbroken.training.checks import check_vocabulary
from unbroken.training.config import TrainerConfig
from unbroken.training.model.sharding import fail_together, on_device
from unbroken.training.waits import log_waiting
from unbroken.types import Numerics
from unbroken.weights.base import InProcessPublisher, WeightPublisher, WeightUpdate

if TYPE_CHECKING:
    from unbroken.client import AsyncClient
    from unbroken.engines.http import HttpEngine
    from unbroken.weights.broadcast import BroadcastPublisher
    from unbroken.weights.disk import DiskPublisher

_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of --max-lora-rank (`vllm.config.lora.MaxLoRARanks`)."""


_STOP_S = 90.0
"""How long a server may take to end before it is killed."""
_POLL_S = 0.1
_STILL_SENT_S = 2.0
"""How long a server that leaves still gets new weights: engines of other processes may find out a little later."""
_SERVES = re.compile(rb"serves .* at (http://\S+)\s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEngine:
    """The engine of a run, and its publisher."""

    engine: Engine
    publisher: WeightPublisher | None
    """None in a process whose engine gets its weights from another process."""
    before_update: Callable[[], Awaitable[None]] | None = None
    """Frees the engine's memory for the trainer."""
    servers: Sequence[str] | EngineDirectory = ()
    """The servers behind the engine, if there are any."""

    def adapt(self, training: TrainerConfig) -> TrainerConfig:
        """The settings, with what exact numerics need to know of this engine."""
        return replace(training, sampler_tensor_parallel=describe_numerics(self.engine)[1])


@asynccontextmanager
async def open_engine(
    config: EngineConfig,
    *,
    model: Any,
    source: str | Path,
    output: Path,
    device: Any,
    rank: Rank,
    image_processor: ImageProcessor | None = None,
    adapter_rank: int | None = None,
    records_routing: bool = False,
    numerics: Numerics = Numerics.FAST,
    is_trained: bool = True,
    lends_memory: bool = True,
    policies: PoliciesConfig | None = None,
    versions: range | None = None,
) -> AsyncIterator[RunEngine]:
    """Open the engine of a run on `model`, which was loaded from `source`; close it when the block ends.

    Each process has its own embedded or colocated engine, on its device. The first process starts servers and sends
    weights; all sample from them. With `adapter_rank`, engines that are started here take adapters of up to this rank
    as updates: one, or those of several `policies` in `versions`. With `records_routing`, they record the experts that
    compute each id; servers that run already must, and have these `numerics`. Untrained models are not copied.

    Raises:
        InvalidInputError: the engine's vocabulary is not the model's, or it cannot have the adapters of the run.
        EngineError: a server does not start, cannot be reached, or serves a different model from the others.
    """
    weights = config.weights_dir or output / "weights"
    vocab_size = None if model is None else len(model.get_input_embeddings().weight)
    lora = _lora_options(adapter_rank, policies, versions) if config.starts_vllm else []
    async with AsyncExitStack() as stack:
        if config.kind is EngineKind.EMBEDDED:
            own = copy.deepcopy(model) if is_trained else model
            found = _open_embedded(stack, config, own, device, image_processor, records_routing, numerics)
        elif config.kind is EngineKind.COLOCATED:
            colocated = _start_colocated(
                config, source, device, rank, lora, image_processor, records_routing, numerics, lends_memory
            )
            found = await stack.enter_async_context(colocated)
        else:
            servers = config.urls if config.urls_file is None else FileDirectory(config.urls_file)
            if config.kind is EngineKind.STARTED:
                command = _serve_command(config, source, weights, lora, records_routing, numerics)
                server = start_server(command, output / "server.log", wait_s=config.wait_s)
                servers = await _start_in_first_process(stack, server, rank)
            found = await stack.enter_async_context(_connect(servers, config, weights, rank, device, vocab_size))
        _check_engine(found, vocab_size, numerics)
        _check_adapters(found, adapter_rank, policies, versions)
        yield found


def _check_engine(opened: RunEngine, vocab_size: int | None, numerics: Numerics) -> None:
    engine: Any = opened.engine
    if vocab_size is not None:
        check_vocabulary(engine, vocab_size)
    own, _ = describe_numerics(engine)
    if numerics is Numerics.EXACT and own is not numerics:
        raise InvalidInputError(
            f"trainer.numerics must be fast with an engine whose numerics are {own}, got exact: start its servers with "
            "--numerics exact"
        )


def _check_adapters(
    opened: RunEngine, rank: int | None, policies: PoliciesConfig | None, versions: range | None
) -> None:
    """Raise `InvalidInputError` if an engine cannot have the adapters of a run, which makes these versions if no server
    has newer ones.
    """
    if rank is not None and (room := AdapterRoom.of(opened.engine)) is not None:
        newest = opened.engine.policy_version
        if versions is not None and newest > versions[0]:
            # After a kill the loop begins above a server's versions, and more copies are behind it.
            versions = range(newest + 1, newest + 1 + len(versions))
        _check_room(room, rank, policies, versions)
    if policies is not None and opened.servers:
        _check_names(policies, opened.engine)


def _check_room(room: AdapterRoom, rank: int, policies: PoliciesConfig | None, versions: range | None) -> None:
    """Raise `InvalidInputError` if an engine has too little room for the adapters of a run, which it would say at the
    first update that has them, after steps were made.
    """
    num_adapters = 1 if policies is None else policies.count_adapters(versions)
    if policies is None and room.max_adapters < 1:
        raise InvalidInputError(
            "trainer.lora_updates must be merged, or the engine started with room for an adapter (engine.options, or "
            f"at the servers of engine.urls), got adapter: {room.how}"
        )
    if policies is not None and room.max_adapters < num_adapters:
        raise InvalidInputError(
            f"policies must have at most {room.max_adapters} adapters at once with this engine (engine.options, or the "
            f"servers of engine.urls), got {num_adapters}, {policies.describe_adapters(num_adapters)}: {room.how}"
        )
    if room.max_rank < rank:
        raise InvalidInputError(
            f"lora.rank must be at most {room.max_rank} with this engine, got {rank}: {room.how_rank}"
        )


def _check_names(policies: PoliciesConfig, engine: Any) -> None:
    """Raise `InvalidInputError` for a policy by whose name servers know the model, which they would sample."""
    if engine.model_name.partition("@")[0] in policies.names:
        raise InvalidInputError(
            f"policies.names must not have the name by which servers know their model, got {engine.model_name!r}: give "
            "the policy another name, or start the servers with another --served-model-name"
        )


@contextmanager
def _naming_vllm() -> Iterator[None]:
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(
            f"{error}. For a model that the embedded engine refuses there is vLLM: engine.kind colocated, or started "
            'with engine.options ["--engine", "vllm"]'
        ) from error


def check_embedded(config: RunConfig, model_config: Any) -> None:
    """Raise `InvalidInputError` for what the embedded engine of a run cannot do, by the config of a model that need not
    be loaded yet.
    """
    own = config.evaluation.sampling
    asked = {"rollouts.sampling": config.rollouts.sampling} | ({} if own is None else {"evaluation.sampling": own})
    for name, sampling in asked.items():
        if sampling.stop_strings:
            raise InvalidInputError(
                f"{name}.stop_strings must be left out with engine.kind embedded, which knows ids and no text, got "
                f"{list(sampling.stop_strings)}: take {name}.stop_token_ids, or engine.kind started"
            )
    with _naming_vllm():
        TransformersEngine.check_config(model_config, config.engine.embedded)


def _open_embedded(
    stack: AsyncExitStack,
    config: EngineConfig,
    model: Any,
    device: Any,
    image_processor: ImageProcessor | None,
    records_routing: bool,
    numerics: Numerics,
) -> RunEngine:
    """Open the embedded engine on a model of its own, until the stack is closed."""
    embedded = replace(
        config.embedded,
        records_routing=config.embedded.records_routing or records_routing,
        numerics=config.embedded.numerics if numerics is Numerics.FAST else numerics,
    )
    with _naming_vllm():
        own = model.to(device)
        if own.config.get_text_config()._attn_implementation == "flex_attention":  # it takes no mask for each row
            own.set_attn_implementation("eager")
        engine = TransformersEngine(own, config=embedded, image_processor=image_processor)
    stack.push_async_callback(engine.close)
    return RunEngine(engine=engine, publisher=InProcessPublisher(engine, **_updating(config)))


@asynccontextmanager
async def _start_colocated(
    config: EngineConfig,
    source: str | Path,
    device: torch.device,
    rank: Rank,
    lora: Sequence[str],
    image_processor: ImageProcessor | None,
    records_routing: bool,
    numerics: Numerics,
    lends_memory: bool,
) -> AsyncIterator[RunEngine]:
    """Start vLLM on this process's GPU, or one on those of several; it sleeps during the steps if it `lends_memory`.

    On a CPU it only pauses, having no sleep mode. All processes start theirs, or none: the others would wait for one
    that is gone.
    """
    size = config.processes_per_engine
    if rank.num_processes % size:
        raise InvalidInputError(
            f"engine.processes_per_engine must divide the number of processes, {rank.num_processes}, got {size}"
        )
    try:
        from unbroken.engines.vllm import VllmEngine, parse_engine_args
    except ModuleNotFoundError as error:
        raise missing_extra(error, "engine.kind colocated needs vLLM", "vllm") from error
    # Nobody reads vLLM's statistics, which take time. As many logprobs as `unbroken serve` has: top_k is below them.
    options = ["--model", str(source), "--disable-log-stats", *_device_options(device, rank, size)]
    options += ["--enable-sleep-mode"] if lends_memory and device.type == "cuda" else []
    options += ["--max-logprobs", str(ServerLimits().max_top_logprobs)]
    options += [*lora, *_routing_options(records_routing), *config.options]

    async def start() -> SleepingEngine:
        with without_launcher():
            return await VllmEngine.start(parse_engine_args(options), numerics=numerics)

    async with AsyncExitStack() as stack:
        if size > 1:
            shared = share_engine(start, source=source, rank=rank, size=size, device=device, processor=image_processor)
            found = await stack.enter_async_context(shared)
            yield found if lends_memory else replace(found, before_update=None)
            return
        with fail_together(device):
            engine = await start()
            stack.push_async_callback(engine.close)
        before_update = engine.sleep if lends_memory else None
        yield RunEngine(engine=engine, publisher=InProcessPublisher(engine), before_update=before_update)


def _device_options(device: torch.device, rank: Rank, size: int) -> list[str]:
    """Options for vLLM on the GPUs of the processes that share it; on a CPU it takes what is there."""
    parallel = ["--tensor-parallel-size", str(size)] if size > 1 else []
    if device.type != "cuda":
        return parallel
    if rank.num_processes == 1:
        return []
    devices: list[int | None] = gather_object([device.index])
    first = rank.index // size * size
    numbers = ",".join(str(number) for number in devices[first : first + size])
    return ["--device-ids", numbers, *parallel]


@asynccontextmanager
async def _connect(
    servers: Sequence[str] | EngineDirectory,
    config: EngineConfig,
    weights: Path,
    rank: Rank,
    device: Any,
    vocab_size: int | None,
) -> AsyncIterator[RunEngine]:
    try:
        from unbroken.client import AsyncClient
        from unbroken.weights.broadcast import BroadcastPublisher
        from unbroken.weights.disk import DiskPublisher
        from unbroken.weights.store import VersionStore
    except ModuleNotFoundError as error:
        raise missing_extra(error, f"engine.kind {config.kind} needs the client extra", "client") from error
    async with AsyncExitStack() as stack:
        engine = await connect_servers(stack, config, servers, vocab_size=vocab_size)
        publisher: DiskPublisher | BroadcastPublisher | None = None
        noting: _NotingPublisher | None = None
        if rank.index == 0:
            key = read_key(config.api_key_file, field="engine.api_key_file")
            # One retry: a server that goes away in an update shall not hold the others up for long.
            make_client = partial(
                AsyncClient, api_key=key, max_retries=1 if isinstance(servers, EngineDirectory) else 4
            )
            clients = [await stack.enter_async_context(make_client(url)) for url in engine.urls]
            if config.transport is WeightTransport.FILES:
                to = config.versions_to
                store = VersionStore(weights) if to is None else VersionStore(to, made_in=weights)
                publisher = DiskPublisher(clients, store, timeout_s=config.publish_timeout_s, **_updating(config))
                if isinstance(servers, EngineDirectory):
                    await stack.enter_async_context(
                        _receiving(publisher, dict(zip(engine.urls, clients, strict=True)), servers, make_client)
                    )
            else:
                publisher = BroadcastPublisher(
                    clients,
                    host=_find_own_host(engine.urls[0]),
                    device=device.type,
                    timeout_s=config.publish_timeout_s,
                    **_updating(config),
                )
                stack.callback(publisher.close)
            noting = _NotingPublisher(publisher, engine)
        yield RunEngine(engine=engine, publisher=noting, servers=servers)


class _NotingPublisher:
    """Tells the engine of each version that its servers have taken, before it has an answer of it: which adapters they
    have depends on it (`PoliciesConfig.list_adapters`).
    """

    def __init__(self, publisher: DiskPublisher | BroadcastPublisher, engine: HttpEngine) -> None:
        self._publisher = publisher
        self._engine = engine

    async def publish(self, named_parameters: Iterable[tuple[str, Any]], *, policy_version: int) -> WeightUpdate:
        update = await self._publisher.publish(named_parameters, policy_version=policy_version)
        self._engine.note_version(policy_version)
        return update

    async def dtype(self) -> str | None:
        return await self._publisher.dtype()


def _find_own_host(url: str) -> str:
    """The address of this machine at which a server, which has been reached at `url`, can reach it."""
    parts = urlsplit(url)
    _, own = find_own_address(parts.hostname or "127.0.0.1", parts.port or 80)
    return own


@asynccontextmanager
async def _receiving(
    publisher: DiskPublisher,
    clients: Mapping[str, AsyncClient],
    directory: EngineDirectory,
    make_client: Callable[[str], AsyncClient],
) -> AsyncIterator[None]:
    """Publish to the servers of a directory during the block; `clients` are those it has already."""
    receivers = _Receivers(publisher, clients, make_client)
    task = follow(directory, receivers, clients)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        await receivers.close()


class _Receivers:
    """The servers that a publisher sends to, as `Members` of a directory."""

    def __init__(
        self, publisher: DiskPublisher, clients: Mapping[str, AsyncClient], make_client: Callable[[str], AsyncClient]
    ) -> None:
        self._publisher = publisher
        self._clients = dict(clients)
        """Those that are gone too: an update may still wait for them."""
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        self._make_client = make_client

    async def join(self, url: str) -> None:
        if url not in self._clients:
            self._clients[url] = self._make_client(url)
        if not await self.is_healthy(url):
            raise ServerUnreachableError("it does not answer")
        if (leaving := self._leaving.pop(url, None)) is not None:
            leaving.cancel()  # before it is admitted, which takes a while
        try:
            await self._publisher.admit(self._clients[url])
        except BaseException:
            self.leave(url)
            raise

    async def is_healthy(self, url: str) -> bool:
        return await self._clients[url].takes_weights()

    def leave(self, url: str) -> None:
        if url in self._clients and url not in self._leaving:
            dismiss = partial(self._publisher.dismiss, self._clients[url])
            self._leaving[url] = asyncio.get_running_loop().call_later(_STILL_SENT_S, dismiss)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()


async def connect_servers(
    stack: AsyncExitStack,
    config: EngineConfig,
    servers: Sequence[str] | EngineDirectory,
    *,
    vocab_size: int | None = None,
) -> HttpEngine:
    """Connect to servers, until the stack is closed; raises as `HttpEngine.connect`."""
    from unbroken.engines.http import HttpEngine

    key = read_key(config.api_key_file, field="engine.api_key_file")
    engine = await HttpEngine.connect(servers, api_key=key, wait_s=config.wait_s, vocab_size=vocab_size)
    stack.push_async_callback(engine.close)
    return engine


def _updating(config: EngineConfig) -> dict[str, Any]:
    """The options of a publisher for requests in flight."""
    return {"in_flight": config.in_flight, "reuse_kv": config.reuse_kv}


async def _start_in_first_process(
    stack: AsyncExitStack, server: AbstractAsyncContextManager[str], rank: Rank
) -> tuple[str]:
    """Start the server in the first process; every process gets its URL, or the error if it does not start."""
    url, failure = "", None
    try:
        if rank.index == 0:
            url = await stack.enter_async_context(server)
    except EngineError as error:
        failure = str(error)
    url, failure = gather_object([(url, failure)])[0]
    if failure is not None:
        raise EngineError(failure)
    return (url,)


def _lora_options(
    adapter_rank: int | None, policies: PoliciesConfig | None, versions: range | None = None
) -> list[str]:
    """Options for vLLM to take adapters of this rank as updates, one or those of policies, with a slot for each."""
    if adapter_rank is None:
        return []
    highest = next((rank for rank in _VLLM_RANKS if rank >= adapter_rank), None)
    if highest is None:
        raise InvalidInputError(
            f"lora.rank must be at most {_VLLM_RANKS[-1]} with trainer.lora_updates adapter and vLLM, got "
            f"{adapter_rank}"
        )
    # Without a GPU, vLLM's last slot stays empty, and the others hold the version in use and the next one.
    num_adapters = 1 if policies is None else policies.count_adapters(versions)
    slots = num_adapters if torch.cuda.is_available() else 2 * num_adapters + 1
    return ["--enable-lora", "--max-lora-rank", str(highest), "--max-loras", str(slots)]


def _serve_command(
    config: EngineConfig,
    source: str | Path,
    weights: Path,
    lora: Sequence[str] = (),
    records_routing: bool = False,
    numerics: Numerics = Numerics.FAST,
) -> list[str]:
    exact = [] if numerics is Numerics.FAST else ["--numerics", numerics]
    exact += ["--dtype", "float32"] if exact and not config.starts_vllm else []
    return [
        sys.executable, "-m", "unbroken", "serve", "--model", str(source), "--port", "0",
        "--weights-dir", str(weights), "--exit-with-parent", *lora,
        *_routing_options(records_routing), *exact, *config.options,
    ]  # fmt: skip


def _routing_options(records_routing: bool) -> list[str]:
    """An option of vLLM, and of `unbroken serve` with either engine."""
    return ["--enable-return-routed-experts"] if records_routing else []


class _EngineHost:
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

    async def dtype(self) -> str | None:
        assert self._engine is not None
        return await self._thread.call(InProcessPublisher(self._engine).dtype())

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
        host: _EngineHost | None = None
        with fail_together(device):
            if rank.index == first:
                host = _EngineHost(source, processor)
                await host.open(start)
                stack.push_async_callback(host.close)
        with on_device(device):
            url, key = gather_object([(host.url, host.key) if host is not None else ("", "")])[first]
        with fail_together(device):
            engine = await HttpEngine.connect((url,), api_key=key)
            stack.push_async_callback(engine.close)
        yield RunEngine(engine=engine, publisher=host, before_update=None if host is None else host.sleep)


@asynccontextmanager
async def start_server(command: Sequence[str], log: Path, *, wait_s: float = 600.0) -> AsyncIterator[str]:
    """Run `command` in its own process during the block; yields the URL that it serves.

    The URL is read from `log`, which gets the server's output: a pipe that nothing reads would fill up and block it.

    Raises:
        EngineError: the server ends before it serves, or does not serve within `wait_s`.
    """
    with open_private(log, "ab") as output, without_launcher():
        begin = output.tell()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C reaches only the trainer, which ends the server
        )
    try:
        shown = " ".join(command)
        try:
            async with asyncio.timeout(wait_s), log_waiting(f"the server to start, which writes to {log}"):
                url = await _read_url(process, log, begin)
        except TimeoutError:
            raise EngineError(f"the server `{shown}` did not serve within {wait_s:g} s (wait_s): see {log}") from None
        if url is None:
            raise EngineError(f"the server `{shown}` ended before it served: {log} says why")
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_S)
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


async def _read_url(process: asyncio.subprocess.Process, log: Path, begin: int) -> str | None:
    """Wait for the URL in what is written to the log from `begin` on; None if the process ends before."""
    with log.open("rb") as written:
        written.seek(begin)
        line = b""
        while True:
            has_ended = process.returncode is not None
            new = line + await asyncio.to_thread(written.read)
            if (found := _SERVES.search(new)) is not None:
                return found[1].decode()
            if has_ended:
                return None
            line = new[new.rfind(b"\n") + 1 :]
            await asyncio.sleep(_POLL_S)
