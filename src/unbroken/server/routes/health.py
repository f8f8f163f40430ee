"""Health and version: for load balancers and people, without a key."""

from __future__ import annotations

from fastapi import Request, Response

from unbroken import __version__
from unbroken.server.context import get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.json import json_response

router = Routes(Access.OPEN)


@router.get("/health", summary="Check the engine", response_description='`{"status": "ok"}`')
@router.get("/health/", include_in_schema=False)
async def _health(request: Request) -> Response:
    """Answer at once: 200 while the engine works, 503 once it is closed or dead.

    With `weights_refused` the newest of the versions that the server follows cannot be used, and it serves the one
    before; its log says why.
    """
    context = get_context(request)
    await context.service.engine.check_health()
    return json_response({"status": "ok", **({"weights_refused": True} if context.weights.refused else {})})


@router.get("/ping", summary="Check the engine (SageMaker)", response_description='`{"status": "ok"}`')
@router.post("/ping", include_in_schema=False)
async def _ping(request: Request) -> Response:
    """The same as /health."""
    return await _health(request)


@router.get("/version", summary="Read the versions of package and weights")
async def _version(request: Request) -> Response:
    """The package's version, the policy version, the model."""
    context = get_context(request)
    return json_response(
        {
            "version": __version__,
            "policy_version": context.service.engine.policy_version,
            "model": context.config.model_name,
        }
    )
