"""Text and messages to ids and back, as vLLM's server does it, with our rendering; and the list of models."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from unbroken.server.context import ServerContext, context_of
from unbroken.server.json_request import OrjsonRoute
from unbroken.server.json_response import json_response
from unbroken.server.problems import HttpError
from unbroken.server.wire_types import Body, Ids, Objects
from unbroken.types import TokenIds

router = APIRouter(route_class=OrjsonRoute)


class TokenizeBody(Body):
    """`messages` to render, or `prompt` to encode."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """For messages; by default true."""
    add_special_tokens: bool | None = None
    """For a prompt; by default true."""
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Ids to decode."""

    model: str | None = None
    tokens: Ids


@router.post(
    "/tokenize",
    summary="Text or messages to ids",
    response_description="`count`, `max_model_len`, `tokens`, and `token_strs` where asked for",
)
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """`{"count", "max_model_len", "tokens", "token_strs"}`."""
    context = context_of(request)
    context.adapter_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise HttpError(400, "give either prompt or messages", param="messages")
    ids, names = await context.text(lambda: _ids_and_names(context, body))
    length = context.service.engine.context_length
    return json_response({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": names})


@router.post("/detokenize", summary="Ids to text", response_description="`prompt`, the text")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """`{"prompt": text}`."""
    context = context_of(request)
    context.adapter_of(body.model)
    size = context.codec.vocab_size
    if max(body.tokens, default=0) >= size:
        raise HttpError(400, f"tokens must lie in [0, {size}), got {max(body.tokens)}", param="tokens")
    return json_response({"prompt": await context.text(lambda: context.codec.decode(body.tokens))})


@router.get(
    "/v1/models",
    summary="The served model",
    response_description="one entry in `data`, with `max_model_len` and `vocab_size`",
)
async def models(request: Request) -> Response:
    """The model and its adapters, with `max_model_len`."""
    context = context_of(request)
    model = {
        "id": context.config.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "unbroken",
        "max_model_len": context.service.engine.context_length,
        "vocab_size": context.service.engine.vocab_size,
    }
    adapters = [{**model, "id": name, "parent": model["id"]} for name in context.config.adapters]
    return json_response({"object": "list", "data": [model, *adapters]})


def _ids_and_names(context: ServerContext, body: TokenizeBody) -> tuple[TokenIds, list[str] | None]:
    ids = _ids(context, body)
    return ids, [context.codec.decode([token_id]) for token_id in ids] if body.return_token_strs else None


def _ids(context: ServerContext, body: TokenizeBody) -> TokenIds:
    if body.prompt is not None:
        return context.codec.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    messages: Any = body.messages
    tools: Any = body.tools or ()
    return context.renderer(body.chat_template_kwargs).render_ids(
        messages, tools=tools, add_generation_prompt=body.add_generation_prompt is not False
    )
