"""Actions on the engine for all clients, under vLLM's names: pause, abort, sleep, adapters.

What an engine cannot do is refused with its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import Query, Request, Response
from pydantic import Field

from unbroken.engines.base import AdapterEngine, Engine, SleepingEngine
from unbroken.errors import EngineError
from unbroken.server.context import get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.bodies import BodyModel, Texts
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.http.json import json_response
from unbroken.server.service import PauseMode

router = Routes(Access.ADMIN)
_DISCARD_ALL = 2
"""The level of sleep that drops the weights, which new ones replace."""

Name = Annotated[str, Field(min_length=1, max_length=4096)]


class AbortBody(BodyModel):
    """Requests to abort."""

    request_ids: Texts | None = None
    """The ids of answers, `request_id`s and `session_id`s; null and an empty list mean all requests."""


class WeightVersionBody(BodyModel):
    """A label for the weights in use."""

    new_version: str


class LoadAdapterBody(BodyModel):
    """A LoRA adapter to load."""

    lora_name: Name
    lora_path: Name
    """A folder in the server's `--weights-dir`."""
    load_inplace: bool = False
    """Must be false: a name stays with its weights."""


class UnloadAdapterBody(BodyModel):
    """A LoRA adapter to unload."""

    lora_name: Name


@router.post("/pause", summary="Pause sampling", response_description='`{"status": "paused"}`')
async def _pause(
    request: Request,
    mode: Annotated[PauseMode, Query()] = PauseMode.ABORT,
    clear_cache: Annotated[bool, Query()] = True,
) -> Response:
    """Pause: `abort` (the default) and `wait` refuse new requests with 503; with `keep` all requests wait."""
    await get_context(request).service.admission.pause(mode, clear_cache=clear_cache)
    return json_response({"status": "paused", "paused": True})


@router.post("/resume", summary="Resume sampling", response_description='`{"status": "resumed"}`')
async def _resume(request: Request) -> Response:
    """Continue after /pause."""
    await get_context(request).service.admission.resume()
    return json_response({"status": "resumed", "paused": False})


@router.post("/abort_requests", summary="Abort requests", response_description='`{"status": "aborted", "aborted": 2}`')
async def _abort_requests(request: Request, body: AbortBody | None = None) -> Response:
    """Abort the requests with these names, or all: they end with what they have."""
    names = None if body is None or not body.request_ids else frozenset(body.request_ids)
    number = await get_context(request).service.admission.abort(names)
    return json_response({"status": "aborted", "aborted": number})


@router.post("/sleep", summary="Give the memory back", response_description='`{"status": "sleeping", "level": 2}`')
async def _sleep(
    request: Request,
    level: Annotated[int, Query(ge=0, le=2)] = 1,
    mode: Annotated[PauseMode, Query()] = PauseMode.ABORT,
) -> Response:
    """Sleep at level 2, once running requests have ended (`wait`) or were aborted (`abort`). New weights wake it."""
    service = get_context(request).service
    engine = service.engine
    if not isinstance(engine, SleepingEngine):
        raise HttpError(400, f"{_name(engine)} cannot sleep: serve with --engine vllm or transformers")
    if level != _DISCARD_ALL:
        raise HttpError(
            400, f"level must be 2, got {level}: {_name(engine)} sleeps until new weights come", param="level"
        )
    if mode is PauseMode.KEEP:
        raise HttpError(
            400, "mode must be 'abort' or 'wait' to sleep, got 'keep': keys and values are lost", param="mode"
        )
    if mode is PauseMode.ABORT:
        await service.admission.abort()
    try:
        await engine.sleep()
    except EngineError as error:
        raise HttpError(409, f"{_name(engine)} cannot sleep now: {error}") from error
    return json_response({"status": "sleeping", "level": level})


@router.post("/wake_up", summary="Wake the engine", response_description='`{"status": "awake"}`')
async def _wake_up(request: Request) -> Response:
    """Answer at once for an engine that is awake. One that sleeps has no weights to wake with, and it is a 409."""
    engine = get_context(request).service.engine
    if isinstance(engine, SleepingEngine) and engine.is_asleep:
        raise HttpError(
            409,
            f"{_name(engine)} sleeps without weights: new ones wake it (POST /v1/weights, /finish_weight_update or "
            "/finish_weight_update)",
        )
    return json_response({"status": "awake", "tags": request.query_params.getlist("tags") or None})


@router.post(
    "/update_weight_version",
    summary="Label the weights",
    response_description='`{"success": true, "new_version": "7"}`',
)
async def _update_weight_version(request: Request, body: WeightVersionBody) -> Response:
    """Confirm the version in use. Another one is a 400: only new weights have a new version (I6)."""
    engine = get_context(request).service.engine
    if body.new_version != str(engine.policy_version):
        raise HttpError(
            400,
            f"new_version must be {str(engine.policy_version)!r}, the version in use, got {shorten(body.new_version)}: "
            f"{_name(engine)} counts its versions itself, one for each update of the weights",
            param="new_version",
        )
    return json_response({"success": True, "new_version": body.new_version})


@router.post("/v1/load_lora_adapter", summary="Load a LoRA adapter (vLLM)")
async def _load_lora_adapter(request: Request, body: LoadAdapterBody) -> Response:
    """Load an adapter, which requests can then name as `model`."""
    context = get_context(request)
    engine = _adapter_engine(context.service.engine)
    if body.load_inplace:
        raise HttpError(
            400, "load_inplace must be false: unload the adapter, or give new weights a new name", param="load_inplace"
        )
    if body.lora_name == context.config.model_name:
        raise HttpError(400, f"lora_name must not be the model's, got {shorten(body.lora_name)}", param="lora_name")
    folder = context.weights.check_folder(Path(body.lora_path), param="lora_path")
    await engine.load_adapter(body.lora_name, folder)
    return _text(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter (vLLM)")
async def _unload_lora_adapter(request: Request, body: UnloadAdapterBody) -> Response:
    """Take no more requests for an adapter."""
    context = get_context(request)
    engine = _adapter_engine(context.service.engine)
    if body.lora_name not in engine.adapters:
        raise HttpError(
            404,
            f"the adapter {shorten(body.lora_name)} does not exist: this server has {sorted(engine.adapters)}",
            param="lora_name",
            code="model_not_found",
        )
    await engine.unload_adapter(body.lora_name)
    return _text(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _adapter_engine(engine: Engine) -> AdapterEngine:
    if not isinstance(engine, AdapterEngine):
        raise HttpError(400, f"{_name(engine)} loads no adapters while it runs: serve with --engine vllm --enable-lora")
    return engine


def _name(engine: Any) -> str:
    return type(engine).__name__


def _text(message: str) -> Response:
    return Response(message, media_type="text/plain")
