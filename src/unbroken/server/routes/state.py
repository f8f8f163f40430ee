"""What the server does now, and its configuration, for Prometheus, load balancers and trainers. The names are vLLM's.

TRL since 1.11 learns from `/server_info` how to send weights.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from unbroken.engines.base import SleepingEngine, TransferEngine, UpdatableEngine
from unbroken.server.context import ServerContext, get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.json import json_response
from unbroken.types import WeightPlacement

router = Routes(Access.CLIENT)


@router.get("/metrics", summary="Read the metrics (Prometheus)", response_class=PlainTextResponse)
async def _metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    context = get_context(request)
    context.metrics.policy_version.set(context.service.engine.policy_version)
    return Response(context.metrics.to_text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/load", summary="Count the requests in flight", response_description='`{"server_load": 3}`')
async def _load(request: Request) -> Response:
    """How many prompts are sampled or wait."""
    return json_response({"server_load": get_context(request).service.admission.num_running})


@router.get("/is_paused", summary="Whether a pause lasts", response_description='`{"is_paused": false}`')
async def _is_paused(request: Request) -> Response:
    """Whether /pause was called, and /resume not since."""
    return json_response({"is_paused": get_context(request).service.admission.is_paused})


@router.get("/is_sleeping", summary="Whether the engine sleeps", response_description='`{"is_sleeping": false}`')
async def _is_sleeping(request: Request) -> Response:
    """Whether the engine has given its memory back; one that cannot sleep is awake."""
    engine = get_context(request).service.engine
    return json_response({"is_sleeping": isinstance(engine, SleepingEngine) and engine.is_asleep})


@router.get("/weight_info", summary="The version of the weights", response_description='`{"weight_version": "7"}`')
async def _weight_info(request: Request) -> Response:
    """The policy version in use, as text."""
    return json_response({"weight_version": str(get_context(request).service.engine.policy_version)})


@router.get(
    "/server_info",
    summary="Read the configuration (vLLM's form)",
    response_description="`vllm_config` with `model_config`, `parallel_config`, and null for what this server lacks",
)
async def _server_info(
    request: Request, config_format: Annotated[Literal["text", "json"], Query()] = "text"
) -> Response:
    """`vllm_config`, as JSON or as a text of it. `weight_transfer_config` is null if the engine takes no transfer."""
    config = await _describe(get_context(request))
    shown = config if config_format == "json" else json.dumps(config)
    return json_response({"vllm_config": shown, "vllm_env": {}, "system_env": {}})


async def _describe(context: ServerContext) -> dict[str, Any]:
    engine = context.service.engine
    placement, world_size = WeightPlacement(dtype=None, device="cpu"), 1
    if isinstance(engine, UpdatableEngine):
        placement, world_size = await engine.weight_placement(), engine.world_size
    backend = "nccl" if placement.device == "cuda" else "gloo"
    return {
        "model_config": {
            "model": context.config.model_name,
            "served_model_name": context.config.model_name,
            "max_model_len": engine.context_length,
            "dtype": f"torch.{placement.dtype}",
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": min(context.config.limits.max_top_logprobs, engine.vocab_size),
        },
        "parallel_config": {"world_size": world_size},
        # With one, TRL's asynchronous trainers send adapters through a shared folder instead of all weights.
        "lora_config": None,
        "weight_transfer_config": {"backend": backend} if isinstance(engine, TransferEngine) else None,
    }
