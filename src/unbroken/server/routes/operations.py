"""Health, metrics, version: for load balancers, Prometheus and people."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from unbroken import __version__
from unbroken.server.context import get_context
from unbroken.server.http.json import json_response

router = APIRouter()


@router.get("/health", summary="Check the engine", response_description='`{"status": "ok"}`')
@router.get("/health/", include_in_schema=False)
async def health(request: Request) -> Response:
    """Answer at once: 200 while the engine works, 503 once it is closed or dead."""
    await get_context(request).service.engine.check_health()
    return json_response({"status": "ok"})


@router.get("/metrics", summary="Read the metrics (Prometheus)")
async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    context = get_context(request)
    context.metrics.policy_version.set(context.service.engine.policy_version)
    return Response(context.metrics.to_text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version", summary="Read the versions of package and weights")
async def version(request: Request) -> Response:
    """The package's version, the policy version, the model."""
    context = get_context(request)
    return json_response(
        {
            "version": __version__,
            "policy_version": context.service.engine.policy_version,
            "model": context.config.model_name,
        }
    )
