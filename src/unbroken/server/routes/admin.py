"""Pausing and resuming the engine for all clients."""

from __future__ import annotations

from fastapi import Request, Response

from unbroken.server.context import get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.json import json_response

router = Routes(Access.ADMIN)


@router.post("/pause", summary="Pause sampling")
async def pause(request: Request) -> Response:
    """Stop sampling after the current step; requests wait and keep their ids so far."""
    await get_context(request).service.engine.pause()
    return json_response({"paused": True})


@router.post("/resume", summary="Resume sampling")
async def resume(request: Request) -> Response:
    """Continue after /pause."""
    await get_context(request).service.engine.resume()
    return json_response({"paused": False})
