"""The way from a sandbox without a network to the gateway: a server on the sandbox's loopback, served from outside.

Its launcher opened the socket in the sandbox, and passed it out: so the sandbox needs no program for it, and has no
other way out.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from urllib.parse import urlsplit, urlunsplit

from unbroken.errors import InvalidInputError
from unbroken.rollout.agents.session import AgentSession

PORT = 41417
"""Of the gateway, in the sandbox."""
_CHUNK_BYTES = 1 << 16


@dataclass(slots=True, kw_only=True)
class Bridge:
    """Connects a sandbox to one address."""

    host: str
    port: int
    num_connections: int = 0

    @classmethod
    def to_gateway(cls, session: AgentSession) -> Bridge:
        """A bridge to the gateway of a session; raises `InvalidInputError` for one that speaks HTTPS."""
        parts = urlsplit(session.openai_base_url)
        if parts.scheme != "http" or parts.hostname is None:
            raise InvalidInputError(
                f"a sandbox without a network reaches a gateway at http:// only, got {session.openai_base_url!r}: let "
                'the run open its own gateway, or set environment_arguments.network = "task" for tasks with a network'
            )
        return cls(host=parts.hostname, port=parts.port or 80)

    @asynccontextmanager
    async def serving(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serve the connections that come to a socket of the sandbox, until the block ends."""
        listener.setblocking(False)
        tasks: set[asyncio.Task[None]] = set()

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            self.num_connections += 1
            await self._join(reader, writer)

        server = await asyncio.start_server(connect, sock=listener)
        try:
            yield
        finally:
            server.close()
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            out_reader, out_writer = await asyncio.open_connection(self.host, self.port)
        except OSError:
            writer.close()  # the agent sees a closed connection, as from a gateway that is gone
            return
        try:
            async with asyncio.TaskGroup() as directions:
                directions.create_task(_copy(reader, out_writer))
                directions.create_task(_copy(out_reader, writer))
        finally:
            writer.close()
            out_writer.close()


def move_session(session: AgentSession) -> AgentSession:
    """The session by the URLs that lead through the bridge."""
    return replace(
        session,
        openai_base_url=_move(session.openai_base_url),
        anthropic_base_url=_move(session.anthropic_base_url),
    )


def _move(url: str) -> str:
    return urlunsplit(urlsplit(url)._replace(netloc=f"127.0.0.1:{PORT}"))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
