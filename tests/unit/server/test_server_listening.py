"""The port of `unbroken serve`."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from support.servers import asgi_client, make_app, scripted_engine
from unbroken.errors import InvalidInputError
from unbroken.server.config import format_url
from unbroken.server.process import HttpServer, listen, make_uvicorn_config


async def test_answers_do_not_wait_for_nagles_algorithm() -> None:
    found: asyncio.Queue[int] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        found.put_nowait(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listen("127.0.0.1", 0)
    async with await asyncio.start_server(accept, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await found.get() != 0
        writer.close()
        await writer.wait_closed()


def test_a_port_in_use_is_an_error_before_anything_is_loaded() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(InvalidInputError, match=rf"--port {port}: "):
            listen("127.0.0.1", port)


def test_the_url_of_an_ipv6_address_has_brackets() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert format_url(*listener.getsockname()[:2]) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        listener = listen("::1", 0)
    except InvalidInputError:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert format_url(*listener.getsockname()[:2]) == f"http://[::1]:{listener.getsockname()[1]}"


@asynccontextmanager
async def serving(app: Any = None, *, keep_alive_s: int = 60) -> AsyncIterator[tuple[str, int]]:
    """Serve an application, by default one with a key, as `unbroken serve` does."""
    app = app or make_app(scripted_engine("hi"), api_key="right")
    with listen("127.0.0.1", 0) as listener:
        config = make_uvicorn_config(app, drain_s=1, keep_alive_s=keep_alive_s)
        config.lifespan = "off"
        server = HttpServer(config)
        work = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
            await asyncio.sleep(0.01)
        try:
            yield listener.getsockname()[:2]
        finally:
            server.should_exit = True
            await work


async def send_all(address: tuple[str, int], pieces: Iterable[bytes]) -> bytes:
    """Send pieces until the server closes the connection, for 10 seconds at most; returns its answer."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        async with asyncio.timeout(60):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
    except ConnectionError:
        return b"closed"
    finally:
        writer.close()


@pytest.mark.parametrize(
    "start", [b"GET /", b"GET / HTTP/1.1\r\nHost: localhost\r\nA: ", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 9000]
)
async def test_a_head_that_does_not_end_is_ended_without_a_key(start: bytes) -> None:
    async with serving() as address:
        answer = await send_all(address, [start, *[b"A: b\r\n" * 9000] * 100])
        assert answer == b"closed" or answer.startswith(b"HTTP/1.1 400 ")
        assert b"200 OK" in await send_all(address, [b"GET /health HTTP/1.1\r\nConnection: close\r\nA: b\r\n\r\n"])


async def test_headers_are_limited_before_the_key_is_checked() -> None:
    async with asgi_client(make_app(scripted_engine("hi"), api_key="right")) as client:
        for asked in ({"headers": {"A": "b" * 70_000}}, {"headers": {f"A{k}": "b" * 1000 for k in range(70)}}):
            answer = await client.post("/v1/sample", **asked)
            assert answer.status_code == 431
            assert "at most 65536 bytes, got 70" in answer.json()["error"]["message"]


async def test_nothing_of_a_body_is_read_without_a_key() -> None:
    num_read = 0

    async def receive() -> dict[str, object]:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": b"x", "more_body": True}

    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    app = make_app(scripted_engine("hi"), api_key="right")
    scope = {"type": "http", "method": "POST", "path": "/v1/sample", "headers": [], "query_string": b"", "app": app}
    await app(scope, receive, send)
    assert (sent[0]["status"], num_read) == (401, 0)


async def test_trailers_are_not_kept() -> None:
    names: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body", False):
            pass
        names.extend(name for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n2\r\n{}\r\n0\r\n"
    async with serving(app) as address:
        assert b" 204 " in await send_all(address, [head, *[b"A: " + b"b" * 1000 + b"\r\n"] * 200, b"\r\n"])
    assert names == [b"transfer-encoding", b"connection"]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the request's body."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})


BODIES = (b"Content-Length: 4\r\n\r\nbody", b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n", b"\r\n")
LAST = b"POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: 3\r\n\r\nend"


@pytest.mark.parametrize("size", [1, 7, 1000], ids=["byte by byte", "in pieces", "at once"])
@pytest.mark.parametrize("body", BODIES, ids=["length", "chunks", "none"])
@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
async def test_a_request_to_upgrade_is_answered_as_it_is(upgrade: bytes, body: bytes, size: int) -> None:
    """Java's client sends it over http:// with every first request of a connection."""
    head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEA\r\nUpgrade: "
    sent = 2 * (head + upgrade + b"\r\n" + body) + LAST
    async with serving(echo) as address:
        pieces = [sent[k : k + size] for k in range(0, len(sent), size)]
        answers = (await send_all(address, pieces)).split(b"HTTP/1.1 200 OK\r\n")[1:]
    expected = b"" if body == BODIES[-1] else b"body"
    assert [answer.partition(b"\r\n\r\n")[2] for answer in answers] == [expected, expected, b"end"]


async def test_a_wrong_chunk_after_a_request_to_upgrade_is_refused() -> None:
    head = b"POST / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serving(echo) as address:
        assert b" 400 " in await send_all(address, [head, b"zz\r\n"])


@pytest.mark.parametrize(
    "start", [b"", b"GET / HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\n"]
)
async def test_a_connection_without_a_whole_head_is_closed(start: bytes) -> None:
    async with serving(keep_alive_s=1) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(start)

        async def dribble() -> None:
            while start:
                writer.write(b"a")
                await asyncio.sleep(0.2)

        dribbling = asyncio.create_task(dribble())
        answer = b""
        with suppress(ConnectionError):
            async with asyncio.timeout(60):
                while piece := await reader.read(1000):
                    answer += piece
        dribbling.cancel()
        writer.close()
    assert answer.count(b"HTTP/1.1 200") == start.count(b"\r\n\r\n"), "only a whole head is answered"
