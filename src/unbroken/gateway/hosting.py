"""Serves an application from a running event loop, for a gateway beside a trainer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from unbroken.errors import ServerError
from unbroken.server.running import Server, format_url, listen, make_uvicorn_config

_DRAIN_S = 5


@asynccontextmanager
async def hosted(app: FastAPI, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve an application at an address until the block ends; yields its URL.

    Raises:
        ServerError: the application did not start.
    """
    with listen(host, port) as listener:
        server = Server(make_uvicorn_config(app, drain_s=_DRAIN_S))
        serving = asyncio.create_task(_serve(server, listener))
        try:
            while not server.started and not serving.done():  # noqa: ASYNC110  # uvicorn has no event for it
                await asyncio.sleep(0.01)
            if serving.done():
                serving.result()
            yield format_url(listener)
        finally:
            server.should_exit = True
            await serving


async def _serve(server: Server, listener: socket.socket) -> None:
    try:
        await server.serve(sockets=[listener])
    except SystemExit:  # as uvicorn ends if the application does not start
        raise ServerError(f"the server at {format_url(listener)} did not start: the log has its error") from None
