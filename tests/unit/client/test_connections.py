"""Kept connections: reused, given back, and never looked through."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from support.waits import wait_until
from unbroken.client import connections
from unbroken.client.connections import Connections


class EchoServer:
    """Answers each request with the number of its connection, once as many wait as `together`."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.num_open = 0
        self.together = 1
        self._waiting = 0
        self._all_here = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen; the URL."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"http://{host}:{port}"

    async def close(self) -> None:
        """Stop listening."""
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        number = str(self.num_connections).encode()
        try:
            while await reader.readline():
                while (await reader.readline()).strip():
                    pass
                self._waiting += 1
                if self._waiting >= self.together:
                    self._all_here.set()
                await self._all_here.wait()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(number), number))
                await writer.drain()
        finally:
            self.num_open -= 1
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[EchoServer]:
    server = EchoServer()
    yield server
    await server.close()


async def test_one_request_after_the_other_uses_one_connection(server: EchoServer) -> None:
    async with httpx.AsyncClient(base_url=await server.start(), transport=Connections()) as http:
        answers = [(await http.get("/")).text for _ in range(5)]
    assert answers == ["1"] * 5


async def test_requests_at_once_have_a_connection_each_and_leave_them_for_the_next(server: EchoServer) -> None:
    server.together = 20
    async with httpx.AsyncClient(base_url=await server.start(), transport=Connections()) as http:
        for _ in range(3):
            answers = await asyncio.gather(*(http.get("/") for _ in range(20)))
            assert sorted(int(answer.text) for answer in answers) == list(range(1, 21))
    assert server.num_connections == 20


async def test_a_cancelled_request_does_not_leave_its_answer_to_the_next(server: EchoServer) -> None:
    server.together = 2
    async with httpx.AsyncClient(base_url=await server.start(), transport=Connections()) as http:
        leaving = asyncio.create_task(http.get("/"))
        await wait_until(lambda: server._waiting == 1)
        leaving.cancel()
        assert (await http.get("/")).text == "2"


async def test_closing_closes_idle_connections_at_once_and_one_in_use_when_its_answer_is(server: EchoServer) -> None:
    http = httpx.AsyncClient(base_url=await server.start(), transport=Connections())
    server.together = 2
    await asyncio.gather(http.get("/"), http.get("/"))
    async with http.stream("GET", "/") as answer:
        await http.aclose()
        await wait_until(lambda: server.num_open == 1)
        assert await answer.aread() in (b"1", b"2")
    await wait_until(lambda: server.num_open == 0)


async def test_connections_idle_too_long_are_closed_when_another_is_given_back(
    server: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.together = 3
    async with httpx.AsyncClient(base_url=await server.start(), transport=Connections()) as http:
        await asyncio.gather(*(http.get("/") for _ in range(3)))
        monkeypatch.setattr(connections, "_EXPIRY_S", 0.0)
        await http.get("/")
        await wait_until(lambda: server.num_open <= 1)


async def test_a_machine_that_vanishes_is_noticed_by_the_connection_itself(server: EchoServer) -> None:
    async with (
        httpx.AsyncClient(base_url=await server.start(), transport=Connections()) as http,
        http.stream("GET", "/") as answer,
    ):
        found = answer.extensions["network_stream"].get_extra_info("socket")
        assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # for a request that was being sent
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 90_000
        await answer.aread()


async def test_the_last_idle_connection_may_be_taken_while_an_expired_one_closes(
    server: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_EXPIRY_S", -1.0)  # each is expired at once
    async with httpx.AsyncClient(base_url=await server.start(), transport=Connections()) as http:
        server.together = 8
        answers = await asyncio.gather(*(http.get("/") for _ in range(8)))
    assert len({answer.text for answer in answers}) == 8


async def test_a_connection_that_ended_while_the_loop_was_busy_is_not_used_again() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60)
    serving = threading.Thread(target=answer_once_each, args=(listener, 2), daemon=True)
    serving.start()
    async with httpx.AsyncClient(transport=Connections()) as http:
        for _ in range(2):
            assert (await http.get(f"http://127.0.0.1:{listener.getsockname()[1]}/")).text == "ok"
            time.sleep(0.1)  # noqa: ASYNC251
    serving.join(60)
    listener.close()


def answer_once_each(listener: socket.socket, num_connections: int, keep_s: float = 0.0) -> None:
    """Answer one request on each connection, and close it after some time without a word."""
    for _ in range(num_connections):
        connection, _ = listener.accept()
        with connection:
            connection.recv(2**16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            time.sleep(keep_s)


async def test_a_connection_idle_too_long_is_not_used_again(
    server: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with httpx.AsyncClient(base_url=await server.start(), transport=Connections()) as http:
        assert (await http.get("/")).text == "1"
        monkeypatch.setattr(connections, "_EXPIRY_S", 0.01)
        await asyncio.sleep(0.02)
        assert (await http.get("/")).text == "2"
        await wait_until(lambda: server.num_open == 1)


async def serve_raw(answer: bytes) -> asyncio.Server:
    """Answer each request with these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer)
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def test_a_second_answer_in_the_same_bytes_is_not_mixed_with_the_first() -> None:
    raw = await serve_raw(OK + b"HTTP/1.1 500 Other\r\nContent-Length: 4\r\n\r\nmore")
    url = f"http://127.0.0.1:{raw.sockets[0].getsockname()[1]}"
    async with raw, httpx.AsyncClient(base_url=url, transport=Connections()) as http:
        for _ in range(2):
            answer = await http.get("/")
            assert (answer.status_code, answer.text) == (200, "ok")
        await asyncio.sleep(0.05)  # for the server to see its end


async def test_an_endless_head_is_refused() -> None:
    raw = await serve_raw(b"HTTP/1.1 200 OK\r\n" + b"X-More: 12345678\r\n" * 2**17)
    url = f"http://127.0.0.1:{raw.sockets[0].getsockname()[1]}"
    async with raw, httpx.AsyncClient(base_url=url, transport=Connections(), timeout=60) as http:
        with pytest.raises(httpx.RemoteProtocolError, match="head"):
            await http.get("/")
        await asyncio.sleep(0.05)


async def test_a_connection_whose_answer_came_too_late_is_not_kept(server: EchoServer) -> None:
    async with httpx.AsyncClient(base_url=await server.start(), transport=Connections()) as http:
        async with http.stream("GET", "/") as answer:
            answer.extensions["network_stream"]._fail(httpx.ReadTimeout(""))  # in the turn that reads its last bytes
            await answer.aread()
        assert (await http.get("/")).text == "2"


def test_a_client_may_be_used_in_one_event_loop_after_the_other() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60)
    threading.Thread(target=answer_once_each, args=(listener, 2, 1.0), daemon=True).start()
    http = httpx.AsyncClient(transport=Connections(), timeout=60)

    async def ask(*, is_last: bool) -> str:
        text = (await http.get(f"http://127.0.0.1:{listener.getsockname()[1]}/")).text
        if is_last:
            await http.aclose()
        return text

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        assert [asyncio.run(ask(is_last=is_last)) for is_last in (False, True)] == ["ok", "ok"]
        gc.collect()
    listener.close()


@pytest.mark.parametrize("value", ["a\rb", "a\nX-Other: 1", "a\0b"])
async def test_a_header_that_would_end_its_line_is_refused(server: EchoServer, value: str) -> None:
    async with httpx.AsyncClient(base_url=await server.start(), transport=Connections()) as http:
        with pytest.raises(httpx.LocalProtocolError, match="header"):
            await http.get("/", headers={"X-Key": value})
    assert server.num_connections == 0


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", f"http://{'a' * 70}.invalid"])
async def test_an_address_that_cannot_be_is_a_failed_connection(url: str) -> None:
    async with httpx.AsyncClient(transport=Connections()) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(url)


async def test_a_dead_address_leaves_time_for_the_next(server: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    port = httpx.URL(await server.start()).port
    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def find(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(0, 0, 0, "", ("::1", port, 0, 0)), (0, 0, 0, "", ("127.0.0.1", port))]

    async def connect_or_wait(factory: Any, host: str, *args: Any, **options: Any) -> Any:
        if host != "127.0.0.1":
            await asyncio.Event().wait()
        return await connect(factory, host, *args, **options)

    monkeypatch.setattr(loop, "getaddrinfo", find)
    monkeypatch.setattr(loop, "create_connection", connect_or_wait)
    async with httpx.AsyncClient(transport=Connections(), timeout=httpx.Timeout(5, connect=0.5)) as http:
        assert (await http.get(f"http://two.invalid:{port}/")).text == "1"
