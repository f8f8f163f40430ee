"""The port of `unbroken serve`."""

import asyncio
import socket

import pytest

from unbroken.errors import InvalidInputError
from unbroken.server.running import format_url, listen


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
        assert format_url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        listener = listen("::1", 0)
    except InvalidInputError:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert format_url(listener) == f"http://[::1]:{listener.getsockname()[1]}"
