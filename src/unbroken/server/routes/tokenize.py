"""vLLM's routes from text and messages to ids and back, with our rendering; and the list of models."""

from __future__ import annotations

import time
from asyncio import wrap_future
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import Request, Response
from pydantic import ConfigDict

from unbroken.engines.base import AdapterRoom
from unbroken.engines.checks import describe_numerics
from unbroken.images.loader import find_image_parts
from unbroken.messages import get_image_source
from unbroken.server.context import ServerContext, get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.bodies import BodyModel, Ids, Objects
from unbroken.server.http.errors import HttpError
from unbroken.server.http.json import json_response, note_ignored
from unbroken.server.images import ImageIntake
from unbroken.server.texts import check_conversation, check_length
from unbroken.server.wire.conversation import Tools
from unbroken.server.wire.fields import CHAT
from unbroken.types import ImageSpan, TokenIds

router = Routes(Access.CLIENT)


class TokenizeBody(BodyModel):
    """`messages` to render, or `prompt` to encode."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the image processor for all images, such as `max_pixels`."""
    add_generation_prompt: bool | None = None
    """For messages; true by default."""
    add_special_tokens: bool | None = None
    """For a prompt; true by default."""
    return_token_strs: bool | None = None


class DetokenizeBody(BodyModel):
    """Ids to decode."""

    model: str | None = None
    tokens: Ids


@router.post(
    "/tokenize",
    summary="Text or messages to ids",
    response_description="`count`, `max_model_len`, `tokens`, `images`, and `token_strs` if requested",
)
async def _tokenize(body: TokenizeBody, request: Request) -> Response:
    """`{"count", "max_model_len", "tokens", "token_strs"}`, with `images` also the place of each."""
    context = get_context(request)
    await context.policies.find(request, body.model)
    note_ignored(request, CHAT.check(body.model_extra))
    if (body.prompt is None) == (body.messages is None):
        raise HttpError(400, "give either prompt or messages", param="messages")
    intake = context.images
    settings = intake.encode_settings(body.mm_processor_kwargs)
    messages: Any = await intake.load_messages(body.messages or (), settings)
    if body.messages is not None:
        tools: Any = body.tools or ()
        note_ignored(request, await context.find_ineffective(tools, body.chat_template_kwargs or {}))
        messages = await context.adapt_roles(messages, body.chat_template_kwargs or {})
    ids = await wrap_future(context.text_threads.submit(_to_ids, context, body, messages, settings))
    spans = await _place_images(intake, ids, messages, settings)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": context.service.engine.context_length,
        "tokens": ids,
        "token_strs": await wrap_future(
            context.text_threads.submit(lambda: [context.codec.decode([each]) for each in ids])
        )
        if body.return_token_strs
        else None,
    }
    if spans:
        answer["images"] = _format_spans(spans)
    return json_response(answer)


@router.post("/detokenize", summary="Ids to text", response_description="`prompt`, the text")
async def _detokenize(body: DetokenizeBody, request: Request) -> Response:
    """`{"prompt": text}`."""
    context = get_context(request)
    await context.policies.find(request, body.model)
    size = context.codec.vocab_size
    if max(body.tokens, default=0) >= size:
        raise HttpError(400, f"tokens must lie in [0, {size}), got {max(body.tokens)}", param="tokens")
    return json_response({"prompt": await wrap_future(context.text_threads.submit(context.codec.decode, body.tokens))})


@router.get(
    "/v1/models",
    summary="The served model",
    response_description="one entry in `data`, with `max_model_len`, `vocab_size`, `takes_images`, "
    "`image_processor` (its settings), `numerics`, `tensor_parallel_size` and `adapter_room`",
)
async def _models(request: Request) -> Response:
    """The model and its adapters, with `max_model_len`."""
    return json_response({"object": "list", "data": _list_models(get_context(request))})


@router.get("/v1/models/{model_id:path}", summary="One model", response_description="its entry in /v1/models")
async def _model(model_id: str, request: Request) -> Response:
    """The entry of a policy, with `policy`, its name without a version, and `policy_version`, the one that would answer
    now. In a session, any other name has the model's entry.
    """
    context = get_context(request)
    policy = await context.policies.find(request, model_id)
    entry = {**_list_models(context)[0], "id": model_id}
    if policy is not None:
        version = await context.policies.find_version(request, policy)
        entry |= {"policy": policy.name, "policy_version": version}
        entry |= {} if policy.adapter is None else {"parent": context.config.model_name}
    return json_response(entry)


def _list_models(context: ServerContext) -> list[dict[str, Any]]:
    numerics, tensor_parallel_size = describe_numerics(context.service.engine)
    room = AdapterRoom.of(context.service.engine)
    own = {
        "id": context.config.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "unbroken",
        "max_model_len": context.service.engine.context_length,
        "vocab_size": context.service.engine.vocab_size,
        "takes_images": context.images.takes_images,
        "image_processor": context.images.processor_settings,
        "numerics": numerics,
        "tensor_parallel_size": tensor_parallel_size,
        "adapter_room": None if room is None else asdict(room),
    }
    return [own, *({**own, "id": name, "parent": own["id"]} for name in context.policies.adapters)]


async def _place_images(intake: ImageIntake, ids: TokenIds, messages: Any, settings: str) -> tuple[ImageSpan, ...]:
    """Where the images of the messages stand in their ids."""
    images = [get_image_source(part) for _, part in find_image_parts(messages)]
    if not images:
        return ()
    (placed,) = await intake.place([ids], [images], settings)
    return placed.images


def _to_ids(context: ServerContext, body: TokenizeBody, messages: Any, settings: str) -> TokenIds:
    if body.prompt is not None:
        check_length(context, len(body.prompt), name="prompt")
        return context.codec.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    tools: Any = body.tools or ()
    check_conversation(context, messages, tools, body.chat_template_kwargs)
    return context.get_renderer(body.chat_template_kwargs, settings).render_ids(
        messages, tools=tools, add_generation_prompt=body.add_generation_prompt is not False
    )


def _format_spans(spans: Sequence[ImageSpan]) -> list[dict[str, Any]]:
    """The places of images, for answers."""
    return [{"offset": span.offset, "length": span.length, "sha256": span.sha256} for span in spans]
