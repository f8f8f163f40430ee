"""Who may call which path: each file of routes declares it, and the guard checks it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from fastapi.utils import generate_unique_id

from unbroken.server.http.json import OrjsonRoute

DESCRIPTION = "Token-in, token-out sampling in the dialects of trainers and agents: see docs/protocols.md."
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "the field, its rule, the value, and what to do"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": description, "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
    for status, description in (
        ("default", "another error, in the same form"),
        (400, "the request breaks a rule; nothing was sampled"),
        (401, "the key is missing or wrong"),
        (403, "Host or Origin is not one that a server without a key answers"),
        (404, "the model does not exist"),
        (413, "the body is larger than max_body_bytes"),
        (429, "the queue is full: ask again after Retry-After seconds"),
        (500, "the server failed"),
        (503, "the engine is closed or dead"),
        (504, "the request took longer than request_timeout_s and was aborted"),
    )
}


class Access(StrEnum):
    """The key that a path needs, where the server has such a key."""

    OPEN = "open"
    """None: load balancers have no key."""
    CLIENT = "client"
    """The API key."""
    ADMIN = "admin"
    """The admin key, or the API key where there is no admin key: the path changes the engine for all clients."""


def _name_operation(route: APIRoute) -> str:
    """The name of a route for generated clients: of its handler, which is private as its path is its door."""
    return generate_unique_id(route).removeprefix("_")


class Routes(APIRouter):
    """The routes of one file, all with the same access. Bodies are read by orjson."""

    def __init__(self, access: Access) -> None:
        super().__init__(
            route_class=OrjsonRoute, responses=ERROR_RESPONSES, generate_unique_id_function=_name_operation
        )
        self.access = access
