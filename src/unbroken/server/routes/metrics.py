"""Metrics: for Prometheus and load balancers."""

from __future__ import annotations

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from unbroken.server.context import get_context
from unbroken.server.http.access import Access, Routes

router = Routes(Access.CLIENT)


@router.get("/metrics", summary="Read the metrics (Prometheus)", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    context = get_context(request)
    context.metrics.policy_version.set(context.service.engine.policy_version)
    return Response(context.metrics.to_text(), media_type=CONTENT_TYPE_LATEST)
