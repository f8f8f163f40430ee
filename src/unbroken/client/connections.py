"""Kept connections to servers: a transport for `httpx`'s requests and answers, whose parser is httptools."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import select
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, TypeAlias, cast

import httptools
import httpx

_MAX_IDLE = 256
_EXPIRY_S = 4.0
"""Idle time after which a connection is not used again: common servers close theirs after 5 s."""
_MAX_WAITING = 2**20
"""Bytes of one answer that wait for their reader; beyond them the connection is not read."""
_MAX_HEAD = 2**20
"""Bytes of an answer's head."""
_BREAKS = re.compile(rb"[\r\n\0]")
_PORTS = {"http": 80, "https": 443}
_Origin: TypeAlias = tuple[str, str, int]
"""Scheme, host and port."""
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 90_000}
"""TCP notices after 90 s that a machine is gone, however long an answer may take: by keep-alive, or, if it was still
sending a request, by its last limit in ms, which would be 15 minutes."""


class Connections(httpx.AsyncBaseTransport):
    """An `httpx` transport that keeps connections for reuse, the most recently used first.

    httptools reads the answers: httpx's own connections (h11 over anyio) take five times the CPU, and its pool looks
    through all of them at every request. Bodies are sent whole. Proxies in environment variables are not used.
    """

    def __init__(self) -> None:
        self._tls = httpx.create_ssl_context()
        self._idle: deque[_Connection] = deque()
        """Those of all servers, the one that was used last at the end."""
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request over a kept connection, or a new one."""
        timeout = request.extensions.get("timeout", {})
        content = b"".join([part async for part in cast(httpx.AsyncByteStream, request.stream)])
        if any(_BREAKS.search(value) for _, value in request.headers.raw):
            raise httpx.LocalProtocolError("a header must not hold a line break or NUL")
        url = request.url
        origin = url.scheme, url.host, url.port or _PORTS.get(url.scheme, 0)
        connection = self._take(origin) or await self._connect(origin, timeout.get("connect"))
        try:
            await connection.ask(request, content, timeout.get("read"))
        except BaseException:
            connection.close()
            raise
        return httpx.Response(
            connection.status,
            headers=connection.headers,
            stream=_ReusingStream(connection, lambda: self._give_back(connection)),
            extensions={"network_stream": connection},
        )

    async def aclose(self) -> None:
        """Close the idle connections; those in use are closed when their answers are."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _take(self, origin: _Origin) -> _Connection | None:
        oldest_s, loop = time.monotonic() - _EXPIRY_S, asyncio.get_running_loop()
        for kept in reversed(tuple(self._idle)):
            if kept.origin != origin:
                continue
            self._idle.remove(kept)
            if kept.loop is loop and kept.idle_since_s >= oldest_s and not kept.is_ended:
                return kept
            kept.close()
        return None

    async def _connect(self, origin: _Origin, timeout_s: float | None) -> _Connection:
        scheme, host, port = origin
        if scheme not in _PORTS:
            raise httpx.UnsupportedProtocol(f"a URL must begin with http:// or https://, got {scheme!r}")
        try:
            return await self._connect_to_any(origin, timeout_s)
        except TimeoutError:
            raise httpx.ConnectTimeout(f"no connection to {host}:{port} in time") from None
        except (OSError, UnicodeError, OverflowError) as error:
            raise httpx.ConnectError(str(error)) from error

    async def _connect_to_any(self, origin: _Origin, timeout_s: float | None) -> _Connection:
        """Connect to the first address that answers. A dead one takes its part of the time, and leaves the rest."""
        scheme, host, port = origin
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {"ssl": self._tls, "server_hostname": host} if scheme == "https" else {}
        ends_s = None if timeout_s is None else loop.time() + timeout_s
        async with asyncio.timeout_at(ends_s):
            addresses = await _find_addresses(host, port)
        for num_left in range(len(addresses), 0, -1):
            part_s = None if ends_s is None else (ends_s - loop.time()) / num_left
            try:
                async with asyncio.timeout(part_s):
                    _, connection = await loop.create_connection(
                        lambda: _Connection(origin), addresses[-num_left], port, **tls
                    )
                return connection
            except OSError:  # TimeoutError too
                if num_left == 1:
                    raise
        raise OSError(f"{host} has no address")

    def _give_back(self, connection: _Connection) -> None:
        if self._closed or not connection.can_be_reused:
            connection.close()
            return
        connection.idle_since_s = now = time.monotonic()
        self._idle.append(connection)
        while self._idle and (len(self._idle) > _MAX_IDLE or self._idle[0].idle_since_s < now - _EXPIRY_S):
            self._idle.popleft().close()


class _Connection(asyncio.Protocol):
    """One connection: a request is written, and its answer parsed as it comes."""

    def __init__(self, origin: _Origin) -> None:
        self.origin = origin
        self.loop = asyncio.get_running_loop()
        self.idle_since_s = 0.0
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_lost = False
        self._error: Exception | None = None
        self._is_answered = self._is_over = True
        """Whether the head of the answer is there, and its end."""
        self._is_last = False
        """Whether the connection ends with this answer."""
        self._has_no_body = False
        self._ends_with_connection = False
        self._parts: deque[bytes] = deque()
        self._num_waiting = 0
        """Bytes that nobody has read."""
        self._num_head = 0
        """Bytes that came before the end of the head."""
        self._news: asyncio.Future[None] | None = None

    @property
    def is_ended(self) -> bool:
        """Whether an idle connection cannot take a request, also if the loop was too busy to read that it ended."""
        return self.is_lost or _is_readable(self.get_extra_info("socket"))

    @property
    def can_be_reused(self) -> bool:
        """Whether its answer was read to the end, and another request may follow."""
        is_open = not self._is_last and not self.is_lost and self._error is None
        return self._is_over and is_open and not self._parts

    async def ask(self, request: httpx.Request, content: bytes, timeout_s: float | None) -> None:
        """Send a request, and wait for the head of its answer."""
        self._is_answered = self._is_over = self._ends_with_connection = False
        self._num_head = 0
        self._has_no_body = request.method == "HEAD"
        self.headers = []
        self._timeout_s = timeout_s
        self._parser = httptools.HttpResponseParser(self)
        fields = [name + b": " + value + b"\r\n" for name, value in request.headers.raw]
        line = request.method.encode() + b" " + request.url.raw_path + b" HTTP/1.1\r\n"
        head = b"".join([line, *fields, b"\r\n"])
        self._transport.writelines([head, content])
        while not self._is_answered:
            await self._wait()

    async def read(self) -> bytes:
        """The next part of the answer's body; nothing at its end."""
        while not self._parts:
            if self._is_over:
                return b""
            await self._wait()
        part = self._parts.popleft()
        self._num_waiting -= len(part)
        if self._num_waiting < _MAX_WAITING <= self._num_waiting + len(part):
            self._transport.resume_reading()
        return part

    def close(self) -> None:
        """Close it at once; one of another event loop by that, if it still runs."""
        if self.loop is asyncio.get_running_loop():
            self._transport.abort()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._transport.abort)

    def get_extra_info(self, name: str) -> Any:
        """What the transport knows, such as `socket`."""
        return self._transport.get_extra_info(name)

    async def _wait(self) -> None:
        """Wait for news of the answer. Raises what `httpx` does."""
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        self._news = loop.create_future()
        late = None if self._timeout_s is None else loop.call_later(self._timeout_s, self._fail, httpx.ReadTimeout(""))
        try:
            await self._news
        finally:
            self._news = None
            if late is not None:
                late.cancel()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if (found := transport.get_extra_info("socket")) is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if self._ends_with_connection and error is None:
            self._is_over = True
        text = "the connection was closed before the end of the answer"
        self._fail(httpx.RemoteProtocolError(text) if error is None else httpx.ReadError(str(error)))

    def data_received(self, data: bytes) -> None:
        try:
            if self._is_over:
                raise httptools.HttpParserError("bytes that belong to no answer")
            self._parser.feed_data(data)
            self._num_head += 0 if self._is_answered else len(data)
            if self._num_head > _MAX_HEAD:
                raise httptools.HttpParserError(f"the head of the answer is longer than {_MAX_HEAD} bytes")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._is_last = True
            self._fail(httpx.RemoteProtocolError(str(error)))
            self.close()
        self._wake()

    def on_message_begin(self) -> None:
        if self._is_over:
            raise httptools.HttpParserError("bytes that belong to no answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_answered:  # trailers are no headers
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:  # another answer follows
            self.headers = []
            return
        names = {name.lower() for name, _ in self.headers}
        self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"} and self.status not in (
            204,
            304,
        )
        self._is_answered = True
        if self._has_no_body:
            self._is_over = self._is_last = True

    def on_body(self, body: bytes) -> None:
        if self._is_over:  # HEAD has no body
            return
        self._parts.append(body)
        self._num_waiting += len(body)
        if self._num_waiting >= _MAX_WAITING > self._num_waiting - len(body):
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._is_answered:
            self._is_over = True
            self._is_last = self._is_last or not self._parser.should_keep_alive()


async def _find_addresses(host: str, port: int) -> list[str]:
    """The IP addresses of a host, in the order in which to try them."""
    with suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _is_readable(found: socket.socket) -> bool:
    """Whether a socket's end, or bytes that nobody asked for, wait to be read."""
    if not hasattr(select, "poll"):
        return bool(select.select([found], [], [], 0)[0])
    poll = select.poll()
    poll.register(found, select.POLLIN)
    return bool(poll.poll(0))


class _ReusingStream(httpx.AsyncByteStream):
    """An answer's bytes; closing it gives the connection back."""

    def __init__(self, connection: _Connection, give_back: Callable[[], None]) -> None:
        self._connection = connection
        self._give_back: Callable[[], None] | None = give_back

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while part := await self._connection.read():
            yield part

    async def aclose(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()
