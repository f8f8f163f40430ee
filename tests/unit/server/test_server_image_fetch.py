"""Which URLs of images a server fetches, and how far it goes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest

from unbroken.errors import ImageError
from unbroken.server.images import ImageFetcher

FILE = b"the file"


def fetcher(answer: Callable[[httpx.Request], httpx.Response], **options: float) -> ImageFetcher:
    limits = {"max_bytes": 100, **options}
    return ImageFetcher(hosts=("Images.example", "other.example:8080"), transport=httpx.MockTransport(answer), **limits)


def the_file(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=FILE)


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example/a.png",
        "https://IMAGES.example/a.png?b=c",
        "https://images.example:443/",
        "http://other.example:8080/a",
    ],
)
def test_hosts_that_were_named_are_asked(url: str) -> None:
    assert fetcher(the_file)(url) == FILE


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://images.example.evil.example/",
        "http://evil.example/images.example",
        "http://images.example@evil.example/",
        "http://user@images.example/",
        "http://images.example:8080/",
        "http://other.example/",
        "http://sub.images.example/",
        "ftp://images.example/",
        "http://images.example:99999/",
        "http://[images.example/",
        "http:///a",
    ],
)
def test_others_are_not(url: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise AssertionError(f"{request.url} was asked")

    with pytest.raises(ImageError, match="URL"):
        fetcher(answer)(url)


def test_a_redirect_is_followed_within_the_hosts_and_not_for_ever() -> None:
    def redirect(to: str) -> Callable[[httpx.Request], httpx.Response]:
        return lambda request: (
            the_file(request) if request.url.path == "/end" else httpx.Response(302, headers={"Location": to})
        )

    assert fetcher(redirect("/end"))("http://images.example/a") == FILE
    assert fetcher(redirect("http://other.example:8080/end"))("http://images.example/a") == FILE
    with pytest.raises(ImageError, match=r"a host that this server allows.*169\.254"):
        fetcher(redirect("http://169.254.169.254/end"))("http://images.example/a")
    with pytest.raises(ImageError, match="more than 3 redirects"):
        fetcher(redirect("/a"))("http://images.example/a")


def test_a_file_is_read_no_further_than_its_limits() -> None:
    read = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(1000):
            read += 1
            yield b"\x00" * 30

    with pytest.raises(ImageError, match="more than 100 bytes"):
        fetcher(lambda request: httpx.Response(200, content=pieces()))("http://images.example/a")
    assert read <= 5

    async def slow() -> AsyncIterator[bytes]:
        for _ in range(1200):
            await asyncio.sleep(0.05)
            yield b"\x00"

    start_s = time.monotonic()
    with pytest.raises(ImageError, match=r"longer than 0\.1 s"):
        fetcher(lambda request: httpx.Response(200, content=slow()), timeout_s=0.1)("http://images.example/a")
    assert time.monotonic() - start_s < 20, "all of it takes 60 s"


def test_what_is_no_file_is_an_error() -> None:
    with pytest.raises(ImageError, match="HTTP 404"):
        fetcher(lambda request: httpx.Response(404))("http://images.example/a")

    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ImageError, match="cannot be fetched: ConnectError: refused"):
        fetcher(broken)("http://images.example/a")


def test_a_header_that_comes_a_byte_at_a_time_is_inside_the_deadline() -> None:
    with dripping(b"HTTP/1.1 200 OK\r\nX-Slow: " + b"a" * 1000) as port:
        fetch = ImageFetcher(hosts=(f"127.0.0.1:{port}",), max_bytes=100, timeout_s=0.3)
        start_s = time.monotonic()
        with pytest.raises(ImageError, match=r"longer than 0\.3 s"):
            fetch(f"http://127.0.0.1:{port}/a.png")
        assert time.monotonic() - start_s < 20, "the header takes 50 s"


@contextlib.contextmanager
def dripping(answer: bytes) -> Iterator[int]:
    """A server that sends its answer a byte every 50 ms; yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            for byte in answer:
                connection.send(bytes([byte]))
                time.sleep(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        yield listener.getsockname()[1]
        thread.join()


class SlowLookUp(httpx.AsyncBaseTransport):
    """Takes a minute in a thread, as the look-up of a name may, which cannot be cancelled."""

    may_end = threading.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await asyncio.to_thread(self.may_end.wait, 60)
        return httpx.Response(200)


def test_a_slow_look_up_of_the_name_does_not_outlast_the_deadline() -> None:
    fetch = ImageFetcher(hosts=("a.test",), max_bytes=10, timeout_s=0.1, transport=SlowLookUp())
    start = time.monotonic()
    with pytest.raises(ImageError, match=r"takes longer than 0\.1 s"):
        fetch("http://a.test/x.png")
    assert time.monotonic() - start < 20
    SlowLookUp.may_end.set()
