"""One file per dialect, which translates between its wire form and `SamplingService` and does nothing else.

To add a dialect, write a file with a `router = Routes(Access...)` and add its name to `DIALECTS`.
"""

from __future__ import annotations

from importlib import import_module

from fastapi.routing import APIRoute

from unbroken.server.http.access import Access, Routes

DIALECTS = (
    "admin", "chat", "completions", "gemini", "health", "messages", "native", "responses", "state",
    "token_generate", "tokenize", "trl", "trl_weights", "weight_transfer", "weights",
)  # fmt: skip


def load_routers() -> list[Routes]:
    """Import the routers of all dialects. Raises `TypeError` for one that does not declare its access."""
    routers = []
    for name in DIALECTS:
        router = import_module(f"{__name__}.{name}").router
        if not isinstance(router, Routes):
            raise TypeError(f"the router of routes/{name}.py must be Routes(Access...), got {type(router).__name__}")
        routers.append(router)
    return routers


def list_access(routers: list[Routes]) -> dict[str, Access]:
    """The access of each path that needs another key than the API key."""
    found: dict[str, Access] = {
        route.path.rstrip("/"): router.access
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and router.access is not Access.CLIENT
    }
    assert not any("{" in path for path in found), "the guard compares whole paths"
    return found
