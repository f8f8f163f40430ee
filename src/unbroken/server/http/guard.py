"""The outermost layer of the server: who may come in, how much they may bring, and what happens when they leave.

Pure ASGI, so that a request costs one task more and nothing else. The body is read here, up to its limit; from then on
the client's disconnection cancels whatever works for it, which aborts its requests in the engine.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unbroken.server.config import ServerConfig
from unbroken.server.http.errors import HttpError, error_object
from unbroken.server.http.json import json_response
from unbroken.server.metrics import Metrics

OPEN_PATHS = frozenset({"/health", "/version"})
"""Paths that need no key."""


class Guard:
    """ASGI middleware: keys, body limit, disconnection, request metrics."""

    def __init__(self, app: ASGIApp, *, config: ServerConfig, metrics: Metrics, admin_paths: frozenset[str]) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._admin_paths = admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        sender = _Sender(send)
        try:
            self._check_key(scope)
            body = await self._read_body(scope, receive)
            if body is not None:
                await self._run(scope, body, receive, sender)
        except HttpError as problem:
            await json_response(error_object(problem), status=problem.status, headers=problem.headers)(
                scope, receive, sender
            )
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self._metrics.requests.labels(route=route, status=str(sender.status)).inc()
            self._metrics.request_seconds.labels(route=route).observe(time.perf_counter() - start)

    async def _run(self, scope: Scope, body: bytes, receive: Receive, sender: _Sender) -> None:
        work = asyncio.ensure_future(self._app(scope, Replay(body), sender))
        left = asyncio.create_task(_until_disconnected(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not sender.ended:
                self._metrics.aborted_by_client.inc()
                work.cancel()
                sender.status = 499
                await asyncio.wait({work})
                return
            await work
        finally:
            left.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"].rstrip("/") or "/"
        config = self._config
        needed = config.admin_key if path in self._admin_paths and config.admin_key is not None else config.api_key
        if needed is None or path in OPEN_PATHS:
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, b"Bearer " + needed.encode()):
            kind = "admin key" if needed == config.admin_key else "API key"
            raise HttpError(
                401,
                f"this path needs the server's {kind} in the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None if the client left before its end."""
        most = self._config.limits.max_body_bytes
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > most:
            raise _too_large(most)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise _too_large(most)
            if not message.get("more_body", False):
                return b"".join(parts)


class Replay:
    """A `receive` that brings the body once and nothing after it."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def __call__(self) -> MutableMapping[str, Any]:
        """See ASGI."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Future()  # the guard itself waits for the disconnection
        raise AssertionError


class _Sender:
    """A `send` that remembers the status and whether the answer has ended."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.ended = True
        await self._send(message)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(most: int) -> HttpError:
    return HttpError(413, f"a body may have at most {most} bytes (max_body_bytes)", code="body_too_large")
