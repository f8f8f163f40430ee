"""Serves an application from a running event loop, for a gateway beside a trainer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI

_DRAIN_S = 5


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def hosted(app: FastAPI, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve an application at an address until the block ends; yields its URL."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((host, port))
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_DRAIN_S, lifespan="on")
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started and not serving.done():  # noqa: ASYNC110  # uvicorn has no event for it
                await asyncio.sleep(0.01)
            if serving.done():
                serving.result()
            name = f"[{host}]" if ":" in host else host
            yield f"http://{name}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
