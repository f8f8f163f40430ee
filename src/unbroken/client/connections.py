"""Connections kept open for reuse, for many concurrent requests."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

_MAX_IDLE = 256
_EXPIRY_S = 5.0
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""TCP keep-alive notices after 90 s that a machine is gone, however long an answer may take."""


class Connections(httpx.AsyncBaseTransport):
    """An `httpx` transport that keeps connections for reuse, the most recently used first.

    httpx's own pool scans all connections at every request and answer, which costs 9 ms per request with 64 concurrent
    ones. This is a stack of httpx pools of one connection each. Proxies in environment variables are not used.
    """

    def __init__(self) -> None:
        self._tls = httpx.create_ssl_context()
        self._idle: deque[tuple[float, httpx.AsyncHTTPTransport]] = deque()
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        connection = self._idle.pop()[1] if self._idle else self._connect()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            await connection.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _ReusingStream(response.stream, lambda: self._give_back(connection))
        return response

    async def aclose(self) -> None:
        """Close the idle connections; those in use are closed when their answers are."""
        self._closed = True
        while self._idle:
            await self._idle.pop()[1].aclose()

    def _connect(self) -> httpx.AsyncHTTPTransport:
        tcp = [(getattr(socket, name), value) for name, value in _KEEPALIVE.items() if hasattr(socket, name)]
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *((socket.IPPROTO_TCP, *option) for option in tcp)]
        return httpx.AsyncHTTPTransport(verify=self._tls, socket_options=options)

    async def _give_back(self, connection: httpx.AsyncHTTPTransport) -> None:
        if self._closed:
            await connection.aclose()
            return
        now = time.monotonic()
        self._idle.append((now, connection))
        while self._idle and (len(self._idle) > _MAX_IDLE or self._idle[0][0] < now - _EXPIRY_S):
            await self._idle.popleft()[1].aclose()


class _ReusingStream(httpx.AsyncByteStream):
    """An answer's bytes; closing it gives the connection back."""

    def __init__(self, stream: httpx.AsyncByteStream, give_back: Callable[[], Awaitable[None]]) -> None:
        self._stream = stream
        self._give_back: Callable[[], Awaitable[None]] | None = give_back

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        give_back, self._give_back = self._give_back, None
        try:
            await self._stream.aclose()
        finally:
            if give_back is not None:
                await give_back()
