"""`create_gateway`: the server with sessions.

`SessionGate` finds the session of a request before the server's own guard:

Authorization: Bearer ub-session-...      the session's key opens what an agent needs in this session, nothing else;
x-api-key: ub-session-...                 Anthropic's SDKs send it so
x-goog-api-key: ub-session-...            Google's; on their paths also ?key=ub-session-...
/s/ub-session-.../v1/messages             the key in the path, for an agent that sends another key, or none
HEAD /s/ub-session-...                    is answered: some agents look first whether their base URL does

Path and query lose the key there: no metric, log or answer has it. A session's id is a name, and opens nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import httpx
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unbroken.client.connections import Connections
from unbroken.engines.base import Engine
from unbroken.errors import StoreError
from unbroken.gateway.config import GatewayConfig
from unbroken.gateway.routes import router
from unbroken.gateway.session import Session
from unbroken.gateway.sessions import KEY_PREFIX, Sessions
from unbroken.ledger.store.base import SessionStore
from unbroken.messages import Message as ChatMessage
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.server.app import create_app
from unbroken.server.config import ServerConfig
from unbroken.server.context import MakeRenderer, ServerContext
from unbroken.server.http.errors import GOOGLE_METHODS, HttpError, error_response
from unbroken.server.http.guard import (
    ANY_MODEL,
    AUTHORIZED,
    KEY_HEADERS,
    read_keys,
)
from unbroken.server.http.idempotency import KNOWS_RETRIES, ReplayBody
from unbroken.server.http.json import SESSION
from unbroken.server.questions import PlainTurns
from unbroken.server.turns import OpenTurn, Question, TurnOpener

_KEY_OF_URL = "unbroken.key_of_url"
"""Where it has the session's key, if that was in the path or the query."""
_ELSEWHERE = "unbroken.elsewhere"
"""Where it says that another gateway took the session first."""
_HOP = b"x-unbroken-forwarded"
_KEYS = frozenset({b"authorization", *KEY_HEADERS})
_RETRY = b"x-stainless-retry-count"
_OF_CONNECTION = frozenset(
    {
        b"host",
        b"connection",
        b"keep-alive",
        b"transfer-encoding",
        b"upgrade",
        b"te",
        b"trailer",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"date",
        b"server",
        _HOP,
    }
)
"""Headers of one connection, or that each gateway writes itself."""
_CONTROL_PATH = re.compile(r"/v1/sessions/([^/]+)(?:/.*)?")
_CONNECT_S = 5.0
_ENDS = "unbroken.ends"
_PREFIX = re.compile(r"/s/([^/]*)(/.*)?")
_AGENT_PATHS = frozenset(
    {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/conversations"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("GET", "/v1/models"),
    }
)
"""What the key of a session opens, besides the paths of Google's API."""
_GOOGLE_PATH = "/v1beta/models/{model}:generateContent"
_log = logging.getLogger(__name__)
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
        """Note the session of a request and what it may do, if its URL or its key is a session's; else `HttpError`."""
        in_path = await self._take_prefix(scope)
        key = _read_key(scope)
        by_key = None if key is None else await self._find_by_key(key)
        if in_path is not None and by_key is not None and in_path != by_key:
            raise HttpError(403, "the key is another session's than the one in the path", code="wrong_session")
        session_id = by_key or in_path
        if session_id is None:
            if key is not None:
                raise HttpError(401, "the key is no session's: it was deleted, or never was", code="invalid_api_key")
            return
        _check_path(scope)
        if _asks_google(scope):
            _drop_key_of_query(scope)
        scope[SESSION] = session_id
        scope[ANY_MODEL] = session_id
        scope[AUTHORIZED] = scope[KNOWS_RETRIES] = True

    async def _take_prefix(self, scope: Scope) -> str | None:
        """The session of a URL below `/s/KEY`, whose path is then without this; None for another URL."""
        if (found := _PREFIX.fullmatch(scope["path"])) is None:
            return None
        scope["path"] = found[2] or "/"
        scope["raw_path"] = quote(scope["path"]).encode()
        scope[_KEY_OF_URL] = found[1]
        if (session_id := await self._find_by_key(found[1])) is None:
            raise HttpError(
                404,
                "no session has this URL: its session was deleted, or the part after /s/ is not the secret that it "
                "was created with",
                code="session_not_found",
            )
        return session_id


def _check_path(scope: Scope) -> None:
    """Raise `HttpError` for a path that a session's key does not open."""
    method, path = scope["method"], scope["path"].rstrip("/")
    is_probe = method == "HEAD" and not path
    is_model = method == "GET" and path.startswith("/v1/models/")
    if (method, path) in _AGENT_PATHS or is_model or is_probe or _asks_google(scope):
        return
    allowed = sorted({_GOOGLE_PATH, *(path for _, path in _AGENT_PATHS)})
    raise HttpError(403, f"a session may use the paths {allowed}, not {method} {path[:100]}", code="path_not_allowed")


def _asks_google(scope: Scope) -> bool:
    path: str = scope["path"].rstrip("/")
    return scope["method"] == "POST" and path.endswith(GOOGLE_METHODS)


class Forwarding:
    """Passes on requests of sessions that another gateway has at work, and its answers as they come.

        balancer ──► any gateway ── has the session, or nobody has ──► answers
                         │
                         └── another one has it ──► its `--advertise` URL ── cannot be reached ──► here, as if new

    What an owner that died did not answer is asked here again, as its agent's SDK would: marked as a retry, so that a
    turn which that one recorded is not sampled twice. Its session is taken over if its process has ended, and else
    refused with 503 until it answers.

    It stands inside the guard, which has checked the request and read its body. An owner whose machine is gone is
    noticed by its connection (`Connections`), so that an answer may take as long as it takes.
    """

    def __init__(self, app: ASGIApp, *, find_elsewhere: Callable[[str], Awaitable[str | None]]) -> None:
        """`find_elsewhere` gives the URL of the gateway that has a session; None if this one may answer."""
        self._app = app
        self._find_elsewhere = find_elsewhere
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        self._client = httpx.AsyncClient(transport=Connections(), timeout=timeout, trust_env=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, as ASGI has it."""
        if scope["type"] == "lifespan":
            async with self._client:
                await self._app(scope, receive, send)
            return
        session_id = _find_session_of(scope)
        try:
            url = None if session_id is None else await self._find_elsewhere(session_id)
        except StoreError as error:
            await error_response(error, path=scope["path"])(scope, receive, send)
            return
        if session_id is None:
            await self._app(scope, receive, send)
            return
        body: bytes = (await receive()).get("body", b"")
        if url is not None:
            if not await self._pass_on(url, scope, body, send):
                await self._app(scope, ReplayBody(body), send)
            return
        refusal = _Refusal(scope, send)
        await self._app(scope, ReplayBody(body), refusal)
        if refusal.messages and not await self._pass_on_taken(session_id, scope, body, send):
            for message in refusal.messages:
                await send(message)

    async def _pass_on_taken(self, session_id: str, scope: Scope, body: bytes, send: Send) -> bool:
        """Pass on a request whose session another gateway took since it was looked for; returns as `_pass_on` does."""
        with suppress(StoreError):
            url = await self._find_elsewhere(session_id)
            return url is not None and await self._pass_on(url, scope, body, send)
        return False

    async def _pass_on(self, url: str, scope: Scope, body: bytes, send: Send) -> bool:
        """Answer as the gateway at `url` does; returns whether it began to. Else `scope` is the request to answer."""
        target = httpx.URL(url).copy_with(raw_path=scope["raw_path"] + (b"?" + scope["query_string"]).rstrip(b"?"))
        headers = _pass_headers(scope["headers"])
        if (key := scope.get(_KEY_OF_URL)) is not None:  # in a URL, it would be in httpx's log
            headers = [pair for pair in headers if pair[0] not in _KEYS]
            headers.append((b"authorization", b"Bearer " + key.encode()))
        has_begun = False
        try:
            async with self._client.stream(
                scope["method"], target, headers=[*headers, (_HOP, b"1")], content=body
            ) as answer:
                headers = _pass_headers([(name.lower(), value) for name, value in answer.headers.raw])
                has_begun = True
                await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
                async for part in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except httpx.TransportError as error:
            _log.warning("the gateway at %s did not answer to the end: %s: %s", url, type(error).__name__, error)
            if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                scope["headers"] = [*(pair for pair in scope["headers"] if pair[0] != _RETRY), (_RETRY, b"1")]
            return has_begun  # without its end, the connection is closed, and the client sees that the answer was cut
        await send({"type": "http.response.body", "body": b""})
        return True


class _Refusal:
    """A `send` that holds back the answer that another gateway has the session, for that one may answer."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self.messages: list[Message] = []

    async def __call__(self, message: Message) -> None:
        if self._scope.get(_ELSEWHERE):
            self.messages.append(message)
        else:
            await self._send(message)


def _pass_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that are passed on: not those of the connection, and not those that its `Connection` names."""
    headers = list(headers)
    named = b",".join(value for name, value in headers if name == b"connection").lower().split(b",")
    own = _OF_CONNECTION.union(name.strip() for name in named)
    return [pair for pair in headers if pair[0] not in own]


def _find_session_of(scope: Scope) -> str | None:
    """The session that a request is about; None if it is about none, or was passed on already."""
    if scope["type"] != "http" or any(name == _HOP for name, _ in scope["headers"]):
        return None
    named = _CONTROL_PATH.fullmatch(scope["path"])
    session_id: str | None = scope.get(SESSION) or (None if named is None else named[1])
    return session_id


def _add_end(scope: Scope, end: Callable[[bool], None]) -> None:
    """Call `end` when a request is over: with true if it was answered to the end."""
    scope[_ENDS].append(end)


def _read_key(scope: Scope) -> str | None:
    """The first key that is a session's; some agents send one as `Authorization` without a scheme."""
    given = [*read_keys(scope), dict(scope["headers"]).get(b"authorization", b"")]
    return next((key for one in given if (key := one.decode("latin-1").strip()).startswith(KEY_PREFIX)), None)


def _drop_key_of_query(scope: Scope) -> None:
    """Take the key out of the query, for which `_KEY_OF_URL` has it, unless the path had one."""
    pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    keys = [value for name, value in pairs if name == "key"]
    if keys:
        scope["query_string"] = urlencode([pair for pair in pairs if pair[0] != "key"]).encode()
        if keys[0].startswith(KEY_PREFIX):
            scope.setdefault(_KEY_OF_URL, keys[0])


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
        session = await self._get_live(request, session_id)
        if question.policy is None:
            policy = await self._context.policies.get(request, session.settings.policy)
            question = replace(question, policy=policy)
        turn, leave = await session.open(self._context, question, id_prefix=id_prefix)
        _add_end(request.scope, leave)
        return turn

    async def recall(self, request: Request, answer_id: str) -> Sequence[ChatMessage] | None:
        """The messages up to the reply that had this id, if the request's session has recorded it."""
        session_id = request.scope.get(SESSION)
        return None if session_id is None else (await self._get_live(request, session_id)).recall(answer_id)

    async def open_conversation(self, request: Request, name: str, items: Sequence[Mapping[str, Any]]) -> bool:
        """Store a conversation of Responses in the request's session; false without a session."""
        if (session_id := request.scope.get(SESSION)) is None:
            return False
        await (await self._get_live(request, session_id)).open_conversation(name, items)
        return True

    async def recall_conversation(self, request: Request, name: str) -> Mapping[str, Any] | None:
        """What the request's session has stored of a conversation."""
        session_id = request.scope.get(SESSION)
        return None if session_id is None else (await self._get_live(request, session_id)).state.conversations.get(name)

    async def _get_live(self, request: Request, session_id: str) -> Session:
        try:
            return await self.sessions.get_live(session_id)
        except HttpError as error:
            request.scope[_ELSEWHERE] = error.code == "session_elsewhere"
            raise

    async def close(self) -> None:
        """End what is kept between turns, when the server stops."""
        await self.sessions.close()
