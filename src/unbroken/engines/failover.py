"""Which of several servers a conversation goes to: its own, unless that one is gone or has old weights."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from unbroken.engines.http_servers import EngineServer
from unbroken.errors import ServerBehindError, ServerError, ServerUnreachableError

_AVOID_S = 15.0
"""How long a server that could not be reached gets no requests."""


class Failover:
    """Remembers which servers could not be reached, and which have older weights than are required."""

    def __init__(self, servers: Sequence[EngineServer]) -> None:
        self._servers = list(servers)
        self._avoid_until_s: dict[EngineServer, float] = {}
        self._behind: set[EngineServer] = set()

    def order(self, session: str) -> list[EngineServer]:
        """Order the servers for a conversation: its own first (rendezvous hashing), unreachable and old ones last."""
        now_s = time.monotonic()

        def rank(server: EngineServer) -> tuple[bool, bytes]:
            avoided = server in self._behind or self._avoid_until_s.get(server, 0.0) > now_s
            return avoided, hashlib.sha256(f"{session}|{server.base_url}".encode()).digest()

        return sorted(self._servers, key=rank)

    async def leave(self, server: EngineServer, error: ServerError) -> ServerError:
        """Send requests to other servers from now on; raises `error` if it is about the request and not the server."""
        if isinstance(error, ServerBehindError):
            self._behind.add(server)
        elif isinstance(error, ServerUnreachableError) or not await server.health():
            self._avoid_until_s[server] = time.monotonic() + _AVOID_S
        else:
            raise error
        return error

    def require_newer(self) -> None:
        """Other weights are published: which servers are behind them is not known yet."""
        self._behind.clear()

    def to_error(self, last: ServerError | None) -> ServerError:
        """The error for a request that every server was asked for, given the last one's."""
        if isinstance(last, ServerBehindError):
            return last
        return ServerUnreachableError(f"none of {[server.base_url for server in self._servers]} can be reached")
