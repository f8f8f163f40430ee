"""`unbroken gateway` and `unbroken serve --sessions`: servers with sessions, until a signal."""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from fastapi import FastAPI
from uvicorn.loops.auto import auto_loop_factory

from unbroken.engines.base import Engine
from unbroken.engines.directory import FileDirectory
from unbroken.engines.http import HttpEngine
from unbroken.errors import InvalidInputError
from unbroken.gateway.app import create_gateway
from unbroken.gateway.config import GatewayConfig
from unbroken.gateway.options import GatewayOptions, SessionOptions
from unbroken.ledger.store import is_postgres_url, open_store
from unbroken.ledger.store.base import SessionStore
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.server.config import ServerConfig
from unbroken.server.context import MakeRenderer
from unbroken.server.options import AppOptions, ServeOptions
from unbroken.server.process import run_server, serve

T = TypeVar("T", bound=AppOptions)


def serve_gateway(options: GatewayOptions) -> int:
    """Serve sessions over upstreams until a signal. Returns the exit status.

    Raises:
        InvalidInputError: an option is invalid.
        StoreError: the store cannot be opened.
        ServerError: an upstream does not answer; `EngineError` if it is of no kind that we know.
    """

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
        return create_gateway(engine, make_renderer, codec, config, store=store, gateway=options.gateway, **images)

    with _open_store(options.store, options.gateway, option="--store") as store:
        options = with_control_key(options, options.gateway, options.store)
        # uvloop where it is installed: 5 % less CPU a turn (bench/gateway.py).
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            return runner.run(
                run_server(
                    options,
                    model=options.tokenizer,
                    tokenizer=options.tokenizer,
                    start_engine=start,
                    make_app=make_app,
                    note=f"; sessions in {_format_location(options.store)}",
                )
            )


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
