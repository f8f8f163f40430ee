"""One file per dialect, which translates between its wire form and `SamplingService` and does nothing else.

To add a dialect, write a file with a `router` and add its name to `DIALECTS`.
"""

from __future__ import annotations

from importlib import import_module

from fastapi import APIRouter
from fastapi.routing import APIRoute

DIALECTS = (
    "chat", "completions", "images", "native", "operations", "token_generate", "tokenize", "trl",
)  # fmt: skip
ADMIN = ("admin", "trl_weights", "weights")
"""Files whose paths change the engine for all clients: they need the admin key, if there is one."""


def load_router(name: str) -> APIRouter:
    """Import the router of a file in this package."""
    router: APIRouter = import_module(f"{__name__}.{name}").router
    return router


def admin_paths() -> frozenset[str]:
    """The paths of the files in `ADMIN`."""
    routes = [route for name in ADMIN for route in load_router(name).routes]
    return frozenset(route.path for route in routes if isinstance(route, APIRoute))
