"""What the server does now, for Prometheus, load balancers and trainers. The names are vLLM's."""

from __future__ import annotations

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from unbroken.engines.base import SleepingEngine
from unbroken.server.context import get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.json import json_response

router = Routes(Access.CLIENT)


@router.get("/metrics", summary="Read the metrics (Prometheus)", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    context = get_context(request)
    context.metrics.policy_version.set(context.service.engine.policy_version)
    return Response(context.metrics.to_text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/load", summary="Count the requests in flight", response_description='`{"server_load": 3}`')
async def load(request: Request) -> Response:
    """How many prompts are sampled or wait."""
    return json_response({"server_load": get_context(request).service.admission.num_running})


@router.get("/is_paused", summary="Whether a pause lasts", response_description='`{"is_paused": false}`')
async def is_paused(request: Request) -> Response:
    """Whether /pause was called, and /resume not since."""
    return json_response({"is_paused": get_context(request).service.admission.is_paused})


@router.get("/is_sleeping", summary="Whether the engine sleeps", response_description='`{"is_sleeping": false}`')
async def is_sleeping(request: Request) -> Response:
    """Whether the engine has given its memory back; one that cannot sleep is awake."""
    engine = get_context(request).service.engine
    return json_response({"is_sleeping": isinstance(engine, SleepingEngine) and engine.is_asleep})


@router.get("/weight_info", summary="The version of the weights", response_description='`{"weight_version": "7"}`')
async def weight_info(request: Request) -> Response:
    """The policy version in use, as text."""
    return json_response({"weight_version": str(get_context(request).service.engine.policy_version)})
