"""Requests of sessions that another gateway has at work: passed on to it, and its answer back, as it comes.

    balancer ──► any gateway ── has the session, or nobody has ──► answers
                     │
                     └── another one has it ──► that one's `--advertise` URL ── cannot be reached ──► here, as if new

What an owner that died did not answer is asked here again, as its agent's SDK would: marked as a retry, so that a turn
which that one recorded is not sampled twice. Its session is taken over if its process has ended, and else refused with
503 until it answers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from unbroken.server.http.guard import ReplayBody

SESSION = "unbroken.session"
"""Where the scope has the id of the session that a request belongs to."""
SENT_PATH = "unbroken.sent_path"
"""Where it has the path as it was sent, with the session's key."""
_HOP = b"x-unbroken-forwarded"
_CONTROL_PATH = re.compile(r"/v1/sessions/([^/]+)(?:/.*)?")
_OF_CONNECTION = frozenset(
    {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"date", b"server", _HOP}
)
_RETRY = b"x-stainless-retry-count"
_CONNECT_S = 5.0
_log = logging.getLogger(__name__)


class Forwarding:
    """ASGI middleware inside the guard, which has checked the request and read its body."""

    def __init__(self, app: ASGIApp, *, find_elsewhere: Callable[[str], Awaitable[str | None]]) -> None:
        """`find_elsewhere` gives the URL of the gateway that has a session; None if this one may answer."""
        self._app = app
        self._find_elsewhere = find_elsewhere
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=_CONNECT_S), limits=httpx.Limits(max_connections=None), trust_env=False
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, as ASGI has it."""
        if scope["type"] == "lifespan":
            async with self._client:
                await self._app(scope, receive, send)
            return
        session_id = _find_session(scope)
        url = None if session_id is None else await self._find_elsewhere(session_id)
        if url is None:
            await self._app(scope, receive, send)
            return
        body: bytes = (await receive()).get("body", b"")
        if not await self._pass_on(url, scope, body, send):
            await self._app(scope, ReplayBody(body), send)

    async def _pass_on(self, url: str, scope: Scope, body: bytes, send: Send) -> bool:
        """Answer as the gateway at `url` does; returns whether it began to. Else `scope` is the request to answer."""
        target = httpx.URL(url).copy_with(raw_path=scope[SENT_PATH] + (b"?" + scope["query_string"]).rstrip(b"?"))
        headers = [pair for pair in scope["headers"] if pair[0] not in _OF_CONNECTION]
        has_begun = False
        try:
            async with self._client.stream(
                scope["method"], target, headers=[*headers, (_HOP, b"1")], content=body
            ) as answer:
                kept = [(name.lower(), value) for name, value in answer.headers.raw]
                kept = [pair for pair in kept if pair[0] not in _OF_CONNECTION]
                has_begun = True
                await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
                async for part in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except httpx.TransportError as error:
            _log.warning("the gateway at %s did not answer to the end: %s: %s", url, type(error).__name__, error)
            if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                scope["headers"] = [*(pair for pair in scope["headers"] if pair[0] != _RETRY), (_RETRY, b"1")]
            return has_begun  # without its end, the connection is closed, and the client sees that the answer was cut
        await send({"type": "http.response.body", "body": b""})
        return True


def _find_session(scope: Scope) -> str | None:
    """The session that a request is about; None if it is about none, or was passed on already."""
    if scope["type"] != "http" or any(name == _HOP for name, _ in scope["headers"]):
        return None
    named = _CONTROL_PATH.fullmatch(scope["path"])
    session_id: str | None = scope.get(SESSION) or (None if named is None else named[1])
    return session_id
