"""Who may call which path: each file of routes declares it, and the guard checks it."""

from __future__ import annotations

from enum import StrEnum

from fastapi import APIRouter

from unbroken.server.http.json import OrjsonRoute
from unbroken.server.http.openapi import ERROR_RESPONSES


class Access(StrEnum):
    """The key that a path needs, where the server has such a key."""

    OPEN = "open"
    """None: load balancers have no key."""
    CLIENT = "client"
    """The API key."""
    ADMIN = "admin"
    """The admin key, or the API key where there is no admin key: the path changes the engine for all clients."""


class Routes(APIRouter):
    """The routes of one file, all with the same access. Bodies are read by orjson."""

    def __init__(self, access: Access) -> None:
        super().__init__(route_class=OrjsonRoute, responses=ERROR_RESPONSES)
        self.access = access
