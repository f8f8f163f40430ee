"""`create_gateway`: the server with sessions."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from unbroken.engines.base import Engine
from unbroken.gateway.config import GatewayConfig
from unbroken.gateway.gate import SessionGate
from unbroken.gateway.routes import router
from unbroken.gateway.sessions import Sessions
from unbroken.gateway.turns import SessionTurns
from unbroken.ledger.store.base import SessionStore
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.server.app import create_app
from unbroken.server.config import ServerConfig
from unbroken.server.context import MakeRenderer, ServerContext
from unbroken.server.turns import TurnOpener


def create_gateway(
    engine: Engine,
    make_renderer: MakeRenderer,
    codec: TextCodec,
    config: ServerConfig,
    *,
    store: SessionStore,
    gateway: GatewayConfig | None = None,
    **options: Any,
) -> FastAPI:
    """Make the application of a server with sessions, which are kept in `store`; it closes the store at its end.

    `options` are those of `create_app`.
    """

    def make_turns(context: ServerContext) -> TurnOpener:
        return SessionTurns(context, Sessions(context, store, gateway or GatewayConfig()))

    app = create_app(engine, make_renderer, codec, config, make_turns=make_turns, more_routers=[router], **options)
    app.state.sessions = app.state.context.turns.sessions
    app.add_middleware(SessionGate, find_by_key=lambda key: app.state.sessions.find_by_key(key))
    return app
