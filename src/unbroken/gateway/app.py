"""`create_gateway`: the server with sessions.

`SessionGate` finds the session of a request before the server's own guard:

Authorization: Bearer ub-session-...      the session's key opens what an agent needs in this session, nothing else;
x-api-key: ub-session-...                 Anthropic's SDKs send it so
/s/ub-session-.../v1/messages             the key in the path, for an agent that sends another key, or none
HEAD /s/ub-session-...                    is answered: some agents look first whether their base URL does

The path loses the key there: no metric, log or answer has it. A session's id is a name, and opens nothing.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unbroken.engines.base import Engine
from unbroken.errors import StoreError
from unbroken.gateway.config import GatewayConfig
from unbroken.gateway.forwarding import SENT_PATH, SESSION, Forwarding
from unbroken.gateway.routes import router
from unbroken.gateway.sessions import KEY_PREFIX, Sessions
from unbroken.ledger.store.base import SessionStore
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.server.app import create_app
from unbroken.server.config import ServerConfig
from unbroken.server.context import MakeRenderer, ServerContext
from unbroken.server.http.errors import HttpError, error_response
from unbroken.server.http.guard import ANY_MODEL, AUTHORIZED, KNOWS_RETRIES
from unbroken.server.questions import PlainTurns
from unbroken.server.turns import OpenTurn, Question, TurnOpener

_ENDS = "unbroken.ends"
_PREFIX = re.compile(r"/s/([^/]*)(/.*)?")
_AGENT_PATHS = frozenset(
    {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("GET", "/v1/models"),
    }
)
"""What the key of a session opens."""
FindByKey = Callable[[str], Awaitable[str | None]]


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
    # The innermost: what is passed on was checked.
    app.user_middleware.append(Middleware(Forwarding, find_elsewhere=app.state.sessions.find_elsewhere))
    app.add_middleware(SessionGate, find_by_key=lambda key: app.state.sessions.find_by_key(key))
    return app


class SessionGate:
    """ASGI middleware outside the guard."""

    def __init__(self, app: ASGIApp, *, find_by_key: FindByKey) -> None:
        self._app = app
        self._find_by_key = find_by_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._find_session(scope)
        except (HttpError, StoreError) as error:
            await error_response(error, path=scope["path"])(scope, receive, send)
            return
        if scope.get(SESSION) is not None and scope["method"] == "HEAD" and scope["path"] == "/":
            await Response()(scope, receive, send)
            return
        ends: list[Callable[[bool], None]] = []
        scope[_ENDS] = ends
        is_delivered = False

        async def send_and_watch(message: Message) -> None:
            nonlocal is_delivered
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                is_delivered = True

        try:
            await self._app(scope, receive, send_and_watch)
        finally:
            for end in ends:
                end(is_delivered)

    async def _find_session(self, scope: Scope) -> None:
        in_path = None
        scope[SENT_PATH] = scope["raw_path"]
        if (found := _PREFIX.fullmatch(scope["path"])) is not None:
            scope["path"] = found[2] or "/"
            scope["raw_path"] = scope["path"].encode()
            if (in_path := await self._find_by_key(found[1])) is None:
                raise HttpError(
                    404,
                    "no session has this URL: its session was deleted, or the part after /s/ is not the secret that it "
                    "was created with",
                    code="session_not_found",
                )
        key = _read_key(scope)
        by_key = await self._find_by_key(key) if key is not None and key.startswith(KEY_PREFIX) else None
        if in_path is not None and by_key is not None and in_path != by_key:
            raise HttpError(403, "the key is another session's than the one in the path", code="wrong_session")
        session_id = by_key or in_path
        if session_id is None:
            if key is not None and key.startswith(KEY_PREFIX):
                raise HttpError(401, "the key is no session's: it was deleted, or never was", code="invalid_api_key")
            return
        path = scope["path"].rstrip("/")
        is_probe = scope["method"] == "HEAD" and not path
        is_model = scope["method"] == "GET" and path.startswith("/v1/models/")
        if (scope["method"], path) not in _AGENT_PATHS and not (is_model or is_probe):
            allowed = sorted({path for _, path in _AGENT_PATHS})
            raise HttpError(
                403,
                f"a session may use the paths {allowed}, not {scope['method']} {path[:100]}",
                code="path_not_allowed",
            )
        scope[SESSION] = session_id
        scope[AUTHORIZED] = scope[ANY_MODEL] = scope[KNOWS_RETRIES] = True


def add_end(scope: Scope, end: Callable[[bool], None]) -> None:
    """Call `end` when a request is over: with true if it was answered to the end."""
    scope[_ENDS].append(end)


def _read_key(scope: Scope) -> str | None:
    headers = dict(scope["headers"])
    given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
    return given.decode("latin-1").strip() or None


class SessionTurns:
    """Opens turns of sessions. See `TurnOpener`."""

    def __init__(self, context: ServerContext, sessions: Sessions) -> None:
        self._context = context
        self.sessions = sessions
        self._plain = PlainTurns(context)

    async def open(self, request: Request, question: Question, *, id_prefix: str) -> OpenTurn:
        """Open the turn that answers a question; nothing is sampled yet."""
        session_id = request.scope.get(SESSION)
        if session_id is None:
            return await self._plain.open(request, question, id_prefix=id_prefix)
        session = await self.sessions.get_live(session_id)
        turn, leave = await session.open(self._context, question, id_prefix=id_prefix)
        add_end(request.scope, leave)
        return turn

    async def close(self) -> None:
        """End what is kept between turns, when the server stops."""
        await self.sessions.close()
