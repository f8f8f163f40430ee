"""`unbroken gateway` and `unbroken serve --sessions`: servers with sessions, until a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI

from unbroken.engines.base import Engine
from unbroken.engines.http import HttpEngine
from unbroken.errors import InvalidInputError
from unbroken.gateway.app import create_gateway
from unbroken.gateway.options import GatewayOptions, SessionOptions
from unbroken.ledger.store.base import SessionStore
from unbroken.ledger.store.opening import open_store
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.server.config import ServerConfig
from unbroken.server.context import MakeRenderer
from unbroken.server.options import ServeOptions
from unbroken.server.running import run_server
from unbroken.server.serve import serve


def serve_gateway(options: GatewayOptions) -> int:
    """Serve sessions over upstreams until a signal. Returns the exit status.

    Raises:
        InvalidInputError: an option is invalid.
        StoreError: the store cannot be opened.
        ServerError: an upstream does not answer; `EngineError` if it is of no kind that we know.
    """

    async def start(codec: TextCodec, *_: Any) -> Engine:
        return await HttpEngine.connect(
            options.upstream,
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

    with _open_store(options.store, option="--store") as store:
        return asyncio.run(
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
    with _open_store(sessions.sessions, option="--sessions") as store:
        return serve(
            options,
            make_app=partial(create_gateway, store=store, gateway=sessions.gateway),
            note=f"; sessions in {_format_location(sessions.sessions)}",
        )


@contextmanager
def _open_store(location: str, *, option: str) -> Iterator[SessionStore]:
    """Open the store before anything is loaded. The application closes it too, after its last turn."""
    try:
        store = open_store(location)
    except InvalidInputError as error:
        raise InvalidInputError(str(error).replace("store ", f"{option} ", 1)) from None
    try:
        yield store
    finally:
        store.close()


def _format_location(location: str) -> str:
    """A location without what may be a password."""
    return "PostgreSQL" if "://" in location else location
