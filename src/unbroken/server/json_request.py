"""Bodies read by orjson, which takes a tenth of the time for long lists of ids."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute


class OrjsonRoute(APIRoute):
    """The kind of all routes that take a body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        handle = super().get_route_handler()

        async def handle_with_orjson(request: Request) -> Response:
            return await handle(_OrjsonRequest(request.scope, request.receive))

        return handle_with_orjson


class _OrjsonRequest(Request):
    async def json(self) -> Any:
        """The body, whose strings are UTF-8 and whose numbers are finite; None where there is none."""
        body = await self.body()
        return orjson.loads(body) if body else None
