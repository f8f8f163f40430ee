"""The outermost layer of the server: origins, keys, the body's size, and cancellation when a client disconnects.

The guard reads the body, up to its limit. From then on, a disconnection of the client cancels the request's task, which
aborts its requests in the engine. The guard is pure ASGI: it costs one task per request and nothing else.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unbroken.server.config import ServerConfig, is_loopback
from unbroken.server.http.access import Access
from unbroken.server.http.errors import GOOGLE_METHODS, HttpError, error_response, shorten
from unbroken.server.http.idempotency import Idempotency, ReplayBody
from unbroken.server.metrics import Metrics

AUTHORIZED = "unbroken.authorized"
"""Where the scope says that a layer outside has checked the key of a client."""
MAX_HEAD_BYTES = 2**16
"""Of headers and query, which are read before a key is checked."""
KEY_HEADERS = (b"x-api-key", b"x-goog-api-key")
"""Headers whose value is a key."""
ANY_MODEL = "unbroken.any_model"
"""Where the scope has the session whose agent may call its policy what it likes (`server.policies`)."""


class Guard:
    """ASGI middleware: origins, keys, body limit, disconnection, request metrics; and retries, by `Idempotency`."""

    def __init__(self, app: ASGIApp, *, config: ServerConfig, metrics: Metrics, access: Mapping[str, Access]) -> None:
        """`access` has the paths that need another key than the API key."""
        self._app = app
        self._repeatable = Idempotency(app, metrics=metrics)
        self._config = config
        self._metrics = metrics
        self._access = access
        self._origins = _OriginCheck(hosts=config.hosts) if config.checks_origin else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Each path is answered with and without trailing slashes: a redirect would contain the client's own Host.
        scope["path"] = scope["path"].rstrip("/") or "/"
        start = time.perf_counter()
        sender = _Sender(send)
        try:
            self._check(scope)
            body = await self._read_body(scope, receive)
            if body is not None:
                app = self._repeatable if self._repeatable.takes(scope) else self._app
                work = asyncio.ensure_future(app(scope, ReplayBody(body), sender))
                await self._wait(work, receive, sender)
        except HttpError as error:
            await error_response(error, path=scope["path"])(scope, receive, sender)
        except asyncio.CancelledError:  # only the end of the server does this, once `drain_s` is over
            if not sender.status:
                await error_response(_stopped(), path=scope["path"])(scope, receive, sender)
            raise
        except Exception:
            sender.status = sender.status or 500  # answered outside of the guard
            raise
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self._metrics.requests.labels(route=route, status=str(sender.status)).inc()
            self._metrics.request_seconds.labels(route=route).observe(time.perf_counter() - start)

    async def _wait(self, work: asyncio.Future[None], receive: Receive, sender: _Sender) -> None:
        """Wait for the end of a request's work, and end it if its client disconnects before."""
        disconnected = asyncio.create_task(_wait_for_disconnection(receive))
        try:
            await asyncio.wait({work, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not sender.ended:
                self._metrics.aborted_by_client.inc()
                work.cancel()
                sender.status = 499
                await asyncio.wait({work})
                return
            await work
        finally:
            disconnected.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})

    def _check(self, scope: Scope) -> None:
        """Raise `HttpError` for a request that is refused before its body is read."""
        if self._origins is not None:
            self._origins.check(scope)
        _check_head(scope)
        self._check_key(scope)

    def _check_key(self, scope: Scope) -> None:
        access = self._access.get(scope["path"], Access.CLIENT)
        config = self._config
        expected = config.api_key if access is not Access.ADMIN or config.admin_key is None else config.admin_key
        if expected is None or access is Access.OPEN or (access is Access.CLIENT and scope.get(AUTHORIZED)):
            return
        given = [hmac.compare_digest(key, expected.encode()) for key in read_keys(scope)]
        if not any(given):
            kind = "admin key" if expected == config.admin_key else "API key"
            raise HttpError(
                401,
                f"this path needs the server's {kind} in the header Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Read the body; None if the client disconnects before its end."""
        max_bytes = self._config.limits.max_body_bytes
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
            raise _too_large(max_bytes)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > max_bytes:
                raise _too_large(max_bytes)
            if not message.get("more_body", False):
                return b"".join(parts)


def read_keys(scope: Scope) -> list[bytes]:
    """The keys that a request gives.

    They come as `Authorization: Bearer KEY` or, as the clients of Anthropic and Google send them, `x-api-key: KEY`,
    `x-goog-api-key: KEY`, and on Google's paths `?key=KEY`.
    """
    headers = dict(scope["headers"])
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    given = [bearer if scheme == b"Bearer" else b"", *(headers.get(name, b"") for name in KEY_HEADERS)]
    if scope["path"].endswith(GOOGLE_METHODS):
        given += [value for name, value in parse_qsl(scope["query_string"]) if name == b"key"]
    return [key for key in given if key]


class _Sender:
    """A `send` that records the status and the end of the answer."""

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


async def _wait_for_disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_head(scope: Scope) -> None:
    size = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["query_string"])
    if size > MAX_HEAD_BYTES:
        raise HttpError(431, f"headers and query must have at most {MAX_HEAD_BYTES} bytes, got {size}")


def _stopped() -> HttpError:
    return HttpError(
        503,
        "the server stopped before this request was finished: send it again",
        code="server_stopped",
        headers={"Retry-After": "1"},
    )


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"the body must have at most {max_bytes} bytes (max_body_bytes)", code="body_too_large")


_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[\w.-]+)(?::(\d*))?", re.ASCII | re.IGNORECASE)
_PORTS = {"http": "80", "https": "443"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _OriginCheck:
    """Which values of Host and Origin a server without a key answers: it keeps out pages in a browser.

    A browser on this machine reaches the loopback address for every page that it shows. Two headers tell such a page
    apart; programs send the server's own name, and no Origin:

        Host    the name in the URL: after DNS rebinding (evil.example now resolves to 127.0.0.1) it is evil.example
        Origin  the page that sends a POST, which it may do without asking: https://evil.example, or null

    Host may be this machine (localhost, 127.0.0.1, [::1]) or one of the `hosts`, with any port; Origin the same host
    and port as Host, or one of the `hosts` with any port.
    """

    hosts: tuple[str, ...] = ()
    """Names without port, as given by `--allow-host`."""

    def check(self, scope: Scope) -> None:
        """Raise `HttpError` (403) for another Host or Origin. A request without one of them passes that check."""
        own = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        for host in own:
            self._check_host(host)
        for origin in (value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"):
            if not self._is_own_origin(origin, own):
                raise HttpError(
                    403,
                    f"Origin must be this server or a name given by --allow-host, got {shorten(origin)}: a server "
                    "without --api-key answers no web page of another origin",
                    code="foreign_origin",
                )

    def _check_host(self, host: str) -> None:
        name, _ = _split(host) or ("", "")
        if not (is_loopback(name) or self._is_allowed(name)):
            raise HttpError(
                403,
                f"Host must be this machine (localhost, 127.0.0.1, [::1]) or a name given by --allow-host, got "
                f"{shorten(host)}: a server without --api-key answers no other name, because a web page could use it",
                code="unknown_host",
            )

    def _is_own_origin(self, origin: str, hosts: list[str]) -> bool:
        scheme, separator, rest = origin.partition("://")
        default = _PORTS.get(scheme.lower())
        if not separator or default is None or (parts := _split(rest)) is None:
            return False
        name, port = parts
        own = [_split(host) for host in hosts]
        return self._is_allowed(name) or (name, port or default) in [(n, p or default) for n, p in filter(None, own)]

    def _is_allowed(self, name: str) -> bool:
        return name in {_normalize(host) for host in self.hosts}


def _split(host: str) -> tuple[str, str] | None:
    """`[::1]:8000` gives ("::1", "8000"); None if it is not `HOST` or `HOST:PORT`."""
    match = _HOST.fullmatch(host)
    return None if match is None else (_normalize(match[1]), match[2] or "")


def _normalize(name: str) -> str:
    return name.strip("[]").removesuffix(".").lower()
