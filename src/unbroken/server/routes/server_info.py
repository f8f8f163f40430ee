"""The configuration, where clients of vLLM look for it: TRL since 1.11 learns here how to send weights."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response

from unbroken.engines.base import TransferEngine
from unbroken.server.context import ServerContext, get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.json import json_response

router = Routes(Access.CLIENT)


@router.get(
    "/server_info",
    summary="Read the configuration (vLLM's form)",
    response_description="`vllm_config` with `model_config`, `parallel_config`, and null for what this server lacks",
)
async def server_info(
    request: Request, config_format: Annotated[Literal["text", "json"], Query()] = "text"
) -> Response:
    """`vllm_config`, as JSON or as a text of it. `weight_transfer_config` is null if the engine takes no transfer."""
    config = await _describe(get_context(request))
    shown = config if config_format == "json" else json.dumps(config)
    return json_response({"vllm_config": shown, "vllm_env": {}, "system_env": {}})


async def _describe(context: ServerContext) -> dict[str, Any]:
    engine = context.service.engine
    placement = await engine.weight_placement()
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
        "parallel_config": {"world_size": engine.world_size},
        # With one, TRL's asynchronous trainers send adapters through a shared folder instead of all weights.
        "lora_config": None,
        "weight_transfer_config": {"backend": backend} if isinstance(engine, TransferEngine) else None,
    }
