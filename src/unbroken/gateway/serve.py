"""`unbroken gateway` and `unbroken serve --sessions`: servers with sessions, until a signal."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import secrets
import signal
import socket
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TextIO, TypeVar

from fastapi import FastAPI
from starlette.requests import Request

from unbroken.engines.base import Engine
from unbroken.engines.directory import FileDirectory
from unbroken.engines.http import HttpEngine
from unbroken.errors import InvalidInputError, UnbrokenError, UnknownPolicyError
from unbroken.gateway.app import create_gateway
from unbroken.gateway.config import GatewayConfig
from unbroken.gateway.options import GatewayOptions, SessionOptions
from unbroken.images.lru_cache import LruCache
from unbroken.ledger.store import is_postgres_url, open_store
from unbroken.ledger.store.base import SessionStore
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.server.config import ServerConfig, format_url
from unbroken.server.context import MakeRenderer
from unbroken.server.http.errors import HttpError
from unbroken.server.options import AppOptions, ServeOptions
from unbroken.server.policies import CHECKPOINT, Policy, split_version
from unbroken.server.process import listen, run_loop, run_server, serve

T = TypeVar("T", bound=AppOptions)
_SPAWN = multiprocessing.get_context("spawn")
_RESTART_S = 1.0
_END_S = 10.0
"""Beyond the time that turns in flight have to end: for connections, and the store."""
_MAX_KNOWN = 2**12
_MAX_NAME = 1000
"""Characters of a name that an upstream is asked for."""
_log = logging.getLogger(__name__)


def serve_gateway(options: GatewayOptions) -> int:
    """Serve sessions over upstreams until a signal. Returns the exit status.

    Raises:
        InvalidInputError: an option is invalid.
        StoreError: the store cannot be opened.
        ServerError: an upstream does not answer; `EngineError` if it is of no kind that we know.
    """
    if options.workers == 1:
        return _serve_here(options)
    if not is_postgres_url(options.store):
        raise InvalidInputError(
            f"--workers {options.workers} needs a postgresql:// URL as --store, which several processes can share"
        )
    options = with_control_key(options, options.gateway, options.store)
    return asyncio.run(Workers(options, listen(options.host, options.port)).run())


class Workers:
    """Several gateways at one port: this process starts them, starts those that end again, and ends with them.

        agents ──► one port ──► worker 0 ── 127.0.0.1:P0        a session's first request makes a worker its owner;
                           └──► worker 1 ── 127.0.0.1:P1        what reaches another one is passed on to that address

    The first worker's mistakes are those of the command; the others start when it is ready. The port is opened when all
    are: if one served before, and was killed, its clients would connect and wait until another has started (37 s, on a
    machine with much else to do).
    """

    def __init__(self, options: GatewayOptions, listener: socket.socket) -> None:
        self._options = replace(
            options, exit_with_parent=True, gateway=replace(options.gateway, is_worker=True), workers=1
        )
        self._number = options.workers
        self._listener = listener
        self._processes: list[SpawnProcess] = []
        self._num_ready = 0
        self._gate, self._closed = _SPAWN.Pipe(duplex=False)
        """What each worker waits for when it is ready; and what keeps it waiting until it is closed."""

    async def run(self) -> int:
        """Serve until a signal, or until a worker fails at the start. Returns the exit status."""
        work = asyncio.create_task(self._serve())
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signal_number, work.cancel)
        try:
            return await work
        except asyncio.CancelledError:
            return 0
        finally:
            await self._end()

    async def _serve(self) -> int:
        status = 0
        try:
            first, line = await self._start()
            async with asyncio.TaskGroup() as keepers:
                keepers.create_task(self._keep(first, line))
                for _ in range(1, self._number):
                    keepers.create_task(self._keep(None, line))
        except* _StartError as error:
            failed = error.exceptions[0]
            assert isinstance(failed, _StartError)
            status = failed.status
        return status

    async def _keep(self, process: SpawnProcess | None, line: str) -> None:
        """Start a worker, unless one is ready, and again when it ends, again and again. `line` says that one serves."""
        while True:
            if process is None:
                process, _ = await self._start()
            self._num_ready += 1
            if self._num_ready == self._number and not self._closed.closed:
                self._listener.listen()  # whoever reads the line below may connect at once
                self._closed.close()
                print(line.removesuffix(")") + f"; {self._number} workers)", flush=True)
            await _wait_until_readable(process.sentinel)
            self._num_ready -= 1
            await self._restart(process)
            process = None

    async def _start(self) -> tuple[SpawnProcess, str]:
        """Start a worker, and another one if a signal ends it before it is ready, as for want of memory.

        Also returns the line that says that it serves.

        Raises:
            _StartError: it ended by itself, and not all have been ready yet.
        """
        while True:
            process, line = await self._start_once()
            if line:
                return process, line
            if (process.exitcode or 0) >= 0 and not self._closed.closed:
                raise _StartError(process)
            await self._restart(process, " while it started")

    async def _start_once(self) -> tuple[SpawnProcess, str]:
        receiving, sending = _SPAWN.Pipe(duplex=False)
        process = _SPAWN.Process(target=_work, args=(self._options, self._listener, sending, self._gate))
        process.start()
        self._processes.append(process)
        sending.close()
        with receiving:
            await _wait_until_readable(receiving.fileno())
            try:
                return process, str(receiving.recv())
            except EOFError:
                await _wait_until_readable(process.sentinel)
                process.join()
                return process, ""

    async def _restart(self, process: SpawnProcess, when: str = "") -> None:
        """Say that a worker has ended, and wait before another one is started."""
        process.join()
        self._processes.remove(process)
        _log.warning("worker %s ended with status %s%s: starting another", process.pid, process.exitcode, when)
        await asyncio.sleep(_RESTART_S)

    async def _end(self) -> None:
        """End all workers, and kill those that take longer than they may."""
        for process in self._processes:
            process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * self._options.drain_s + _END_S):
                await asyncio.gather(*(_wait_until_readable(process.sentinel) for process in self._processes))
        for process in self._processes:
            process.kill()
            process.join()


class _StartError(Exception):
    """A worker ended by itself before it was ready; says so."""

    def __init__(self, process: SpawnProcess) -> None:
        super().__init__()
        _log.error("worker %s ended with status %s before it served: the gateway ends", process.pid, process.exitcode)
        self.status = process.exitcode or 1


async def _wait_until_readable(descriptor: int) -> None:
    loop, news = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, news.set)
    try:
        await news.wait()
    finally:
        loop.remove_reader(descriptor)


def _work(options: GatewayOptions, shared: socket.socket, ready: Connection, gate: Connection) -> None:
    """Serve as one of several workers, once the other end of `gate` is closed; `ready` gets the line that says that it
    can.
    """
    own = listen("127.0.0.1", 0)
    own.listen()
    options = replace(options, gateway=replace(options.gateway, advertise=format_url(*own.getsockname()[:2])))

    def report(line: str) -> None:
        ready.send(line)
        ready.close()
        with gate, suppress(EOFError):
            gate.recv()

    try:
        sys.exit(_serve_here(options, listeners=[shared, own], report=report))
    except UnbrokenError as error:
        sys.exit(f"unbroken: {error}")


def _serve_here(options: GatewayOptions, **listening: Any) -> int:
    """Serve in this process; `listening` are arguments of `run_server`."""

    async def start(codec: TextCodec, *_: Any) -> Engine:
        return await HttpEngine.connect(
            options.upstream if options.upstream_file is None else FileDirectory(options.upstream_file),
            api_key=options.upstream_key,
            timeout_s=options.config.limits.request_timeout_s,
            wait_s=options.upstream_wait_s,
            vocab_size=codec.vocab_size,
        )

    def make_app(
        engine: Engine, make_renderer: MakeRenderer, codec: TextCodec, config: ServerConfig, **images: Any
    ) -> FastAPI:
        assert isinstance(engine, HttpEngine)
        config = replace(config, adapters=engine.adapters)
        source = UpstreamPolicies(engine, config.model_name)
        return create_gateway(
            engine, make_renderer, codec, config, store=store, gateway=options.gateway, policy_source=source, **images
        )

    with _open_store(options.store, options.gateway, option="--store") as store:
        options = with_control_key(options, options.gateway, options.store)
        return run_loop(
            run_server(
                options,
                model=options.tokenizer,
                tokenizer=options.tokenizer,
                start_engine=start,
                make_app=make_app,
                note=f"; sessions in {_format_location(options.store)}",
                **listening,
            )
        )


class UpstreamPolicies:
    """A `PolicySource`: upstreams are asked what a name means, and get it with each request.

    What a name means, once it means something, stays: the upstream refuses what it has no more.
    """

    def __init__(self, engine: HttpEngine, model_name: str) -> None:
        """`model_name` is what the gateway calls the served model, which may have another name at its upstream."""
        self._engine, self._model_name = engine, model_name
        self._known: LruCache[str, Policy] = LruCache(_MAX_KNOWN)

    async def find(self, request: Request, name: str) -> Policy | None:
        """The policy of a name; `UnknownPolicyError` with the upstream's list for one that claims to be a policy."""
        if (known := self._known.get(name)) is not None or len(name) > _MAX_NAME:
            return known
        _, version = split_version(name)
        try:
            entry = await self._engine.find_model(name)
        except UnknownPolicyError:
            if version is not None or name.startswith(CHECKPOINT):
                raise
            return None
        if "policy" not in entry:  # the upstream takes any name, and this one is not a policy's
            return None
        number = int(version) if version is not None and version != "latest" else None
        found = self._to_policy(name, number, entry)
        self._known.put(name, found)
        return found

    def _to_policy(self, name: str, version: int | None, entry: Mapping[str, Any]) -> Policy:
        """The policy that the upstream's entry of a model describes."""
        if entry.get("parent") is None:
            return Policy(name=self._model_name, adapter=None, version=version)
        adapter = name if "policy_version" in entry else entry["id"]  # stock vLLM takes no name with a version
        return Policy(name=entry["policy"], adapter=adapter, version=version)

    async def find_version(self, request: Request, policy: Policy) -> int:
        """The version that the upstream would answer with."""
        name = policy.adapter or self._engine.model_name
        entry = await self._engine.find_model(name)
        if "policy_version" not in entry:
            rule = "the upstream does not say its version before it samples"
            raise HttpError(400, f"{rule}: name one, such as {policy.name}@3, or leave follow true", param="follow")
        return int(entry["policy_version"])

    async def list_names(self, request: Request) -> Sequence[str]:
        """None: an upstream lists them when it refuses a name."""
        return ()


def serve_with_sessions(options: ServeOptions, sessions: SessionOptions) -> int:
    """Serve a model, with sessions, until a signal. Returns the exit status.

    Raises:
        InvalidInputError: an option is invalid.
        StoreError: the store cannot be opened.
    """
    with _open_store(sessions.sessions, sessions.gateway, option="--sessions") as store:
        options = with_control_key(options, sessions.gateway, sessions.sessions)
        return serve(
            options,
            make_app=partial(create_gateway, store=store, gateway=sessions.gateway),
            note=f"; sessions in {_format_location(sessions.sessions)}",
        )


def with_control_key(options: T, gateway: GatewayConfig, location: str) -> T:
    """The options with a random API key, which is shown once, unless one is given or `no_control_key` is true."""
    if gateway.no_control_key and options.config.api_key is not None:
        raise InvalidInputError("--no-control-key must not be given together with --api-key")
    if gateway.no_control_key or options.config.api_key is not None:
        return options
    key = secrets.token_urlsafe(24)
    _show_key(key, location)
    return replace(options, config=replace(options.config, api_key=key))


def _show_key(key: str, location: str) -> None:
    """Print the key to a terminal or a pipe.

    A file would keep it: if all output goes to files, the key goes to one in the store, which only its user can read.
    """
    for stream in (sys.stderr, sys.stdout):
        if not _is_file(stream):
            print(f"unbroken: the control key, made for this start, is {key}", file=stream, flush=True)
            return
    if is_postgres_url(location):
        raise InvalidInputError(
            "--api-key-file or --no-control-key is needed: the random control key cannot be shown, as all output goes "
            "to files, which would keep it"
        )
    path = Path(location, "control-key")
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(f"{key}\n")
    print(f"unbroken: the control key, made for this start, is in {path}", file=sys.stderr, flush=True)


def _is_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # it has no descriptor, or is closed
        return False


@contextmanager
def _open_store(location: str, gateway: GatewayConfig, *, option: str) -> Iterator[SessionStore]:
    """Open the store before anything is loaded. The application closes it too, after its last turn."""
    if gateway.advertise is not None and not is_postgres_url(location):
        raise InvalidInputError(f"--advertise needs a postgresql:// URL as {option}, which other gateways can share")
    try:
        store = open_store(location, advertised=gateway.advertise)
    except InvalidInputError as error:
        raise InvalidInputError(str(error).replace("store ", f"{option} ", 1)) from None
    try:
        yield store
    finally:
        store.close()


def _format_location(location: str) -> str:
    """A location without what may be a password."""
    return "PostgreSQL" if "://" in location else location
