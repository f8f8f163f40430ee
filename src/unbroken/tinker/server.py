"""`unbroken serve --tinker`: the application, and the paths of the Tinker API."""

from __future__ import annotations

import hashlib
import inspect
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from unbroken.engines.base import Engine
from unbroken.engines.checks import require_updatable
from unbroken.server.app import create_app
from unbroken.server.config import ServerConfig
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.errors import HttpError, error_response
from unbroken.server.http.guard import AUTHORIZED, read_keys
from unbroken.server.http.json import json_response
from unbroken.server.options import ServeOptions
from unbroken.server.policies import Policy
from unbroken.server.process import serve
from unbroken.tinker.api import Answer, TinkerApi
from unbroken.tinker.losses import PROTOBUF
from unbroken.tinker.options import TinkerOptions
from unbroken.tinker.sampling import SwitchedEngine, WeightSwitch, write_base
from unbroken.tinker.sessions import Promise
from unbroken.tinker.store import CallResult, TinkerStore

PREFIX = "/api/v1"
_MAX_LISTED = 1000
_MAX_NAMES = 10
_LOOKS: Mapping[tuple[str, str], Callable[..., Awaitable[Answer]]] = {
    ("GET", "get_server_capabilities"): TinkerApi.describe_server,
    ("POST", "sessions/{session_id}/finish"): TinkerApi.finish_session,
    ("GET", "samplers/{sampler_id}"): TinkerApi.describe_sampler,
    ("GET", "sequences/{sequence_id}"): TinkerApi.describe_sequence,
    ("GET", "training_runs"): TinkerApi.list_runs,
    ("GET", "training_runs/{model_id}"): TinkerApi.describe_run,
    ("GET", "training_runs/{model_id}/checkpoints"): TinkerApi.list_checkpoints,
    ("DELETE", "training_runs/{model_id}/checkpoints/{kind}/{name}"): TinkerApi.delete_checkpoint,
    ("GET", "checkpoints"): TinkerApi.list_checkpoints,
}
"""What is called without a body. Methods that take one are called by POST, by their names."""
_FIXED: Mapping[str, dict[str, Any]] = {
    "client/config": {"sample_join_sampling_session": True, "sample_use_retrieve_futures": True},
    "client/dynamic_config": {"sample_cancel_enabled": True},
    "telemetry": {"status": "accepted"},
}
"""What is always answered the same: flags of the SDK, and what it reports is dropped."""


def serve_tinker(options: ServeOptions, tinker: TinkerOptions) -> int:
    """Serve a model, with the Tinker API, until a signal. Returns the exit status."""
    from unbroken.tinker.models import Models, TrainerProcess

    model, device, keep_days = options.model, tinker.tinker_device, tinker.tinker_keep_days
    open_backend = partial(Models, model) if device is None else partial(TrainerProcess, model, device)
    store = TinkerStore(
        tinker.tinker_store, files=tinker.tinker_files, keep_days=keep_days, sessions=tinker.tinker_sessions
    )
    make_api = partial(TinkerApi, store=store, options=tinker, serving=options, open_backend=open_backend)
    make_base = partial(write_base, target=store.temporary_folder / "base", model=Path(model))
    keys = tinker.read_keys()
    make_app = partial(create_tinker_app, make_api, keys, make_base)
    if keys is not None:
        options = replace(options, config=close_paths(options.config))
    try:
        return serve(options, make_app=make_app, note=f"; the Tinker API with its files in {store.folder}")
    finally:
        store.close()


def close_paths(config: ServerConfig) -> ServerConfig:
    """The configuration of a server with a file of clients' keys: without an API key, it gets one that nobody has.

    The guard answers every path where a server has no API key. Those that change the engine for all clients, such as
    /pause, are no client's: they need --admin-key or --api-key.
    """
    return config if config.api_key is not None else replace(config, api_key=secrets.token_hex(32))


def create_tinker_app(
    make_api: Callable[..., TinkerApi],
    keys: frozenset[bytes] | None,
    make_base: Callable[[Path], Path],
    engine: Engine,
    *given: Any,
    **options: Any,
) -> FastAPI:
    """Make the application of `create_app`, which `given` and `options` are for, with the paths of the Tinker API.

    `make_base` is as for `WeightSwitch`: the other paths sample through it, by the names of checkpoints.
    """
    switch = WeightSwitch(require_updatable(engine), make_base=make_base)
    source, routes = _CheckpointPolicies(), make_routes()
    app = create_app(SwitchedEngine(switch), *given, more_routers=routes, policy_source=source, **options)
    app.state.tinker = make_api(app.state.context, switch=switch)
    if keys is not None:
        app.add_middleware(gate_keys, keys=keys)
    return app


class _CheckpointPolicies:
    """The `PolicySource` of a server with the Tinker API: the checkpoints of the key that a request has."""

    async def find(self, request: Request, name: str) -> Policy | None:
        """The checkpoint of a name; None for another owner's too."""
        api, owner = _find(request)
        return await api.find_policy(owner, name)

    async def find_version(self, request: Request, policy: Policy) -> int:
        """The base model's: checkpoints are found with theirs."""
        return 0

    async def list_names(self, request: Request) -> Sequence[str]:
        """The owner's newest checkpoints."""
        api, owner = _find(request)
        saved = await api.list_checkpoints(owner)
        assert isinstance(saved, list)
        return [each["tinker_path"] for each in saved[:_MAX_NAMES]]


def gate_keys(app: ASGIApp, *, keys: frozenset[bytes]) -> ASGIApp:
    """ASGI middleware outside the guard: the Tinker API's paths need one of several keys, which opens the paths of all
    other clients too, where a request samples from its own checkpoints.
    """
    digests = {hashlib.sha256(key).digest() for key in keys}

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = app
        if scope["type"] == "http":
            matched = [key for key in read_keys(scope) if hashlib.sha256(key).digest() in digests]
            scope[AUTHORIZED] = next(iter(matched), None)
            is_ours = scope["path"].startswith(f"{PREFIX}/") and scope["path"] != f"{PREFIX}/healthz"
            if is_ours and not matched:
                error = HttpError(401, "the key in X-API-Key is none of those in --tinker-keys", code="invalid_api_key")
                answer = error_response(error, path=scope["path"])
        await answer(scope, receive, send)

    return handle


def make_routes() -> list[Routes]:
    """The paths of the Tinker API: the one that needs no key, and the others."""
    routes, open_routes = Routes(Access.CLIENT), Routes(Access.OPEN)
    open_routes.add_api_route(f"{PREFIX}/healthz", partial(_answer_fixed, {"status": "ok"}), name="healthz")
    for name, fixed in _FIXED.items():
        routes.add_api_route(f"{PREFIX}/{name}", partial(_answer_fixed, fixed), methods=["POST"], name=name)
    for name, call in inspect.getmembers(TinkerApi, inspect.iscoroutinefunction):
        if not name.startswith("_") and issubclass(get_type_hints(call).get("body", bytes), BaseModel):
            routes.add_api_route(f"{PREFIX}/{name}", _make_call(call), methods=["POST"], name=name)
    routes.add_api_route(f"{PREFIX}/forward_backward", _forward_backward, methods=["POST"])
    for (method, path), look in _LOOKS.items():
        routes.add_api_route(f"{PREFIX}/{path}", partial(_look, look), methods=[method], name=path)
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    routes.add_api_route(f"{PREFIX}/{{path:path}}", _refuse, methods=methods, include_in_schema=False)
    return [open_routes, routes]


def _find(request: Request) -> tuple[TinkerApi, str]:
    """The API, and who asks: a hash of the key that let the request in, by which a key's own models are known."""
    scope, config = request.scope, request.app.state.context.config
    given = [scope.get(AUTHORIZED), (config.api_key or "").encode(), *read_keys(scope)]
    return request.app.state.tinker, hashlib.sha256(next(filter(None, given), b"")).hexdigest()[:32]


def _respond(answer: Answer) -> Response:
    if isinstance(answer, Promise):
        model_id = None if answer.sequence_ids else answer.request_id.rpartition(":")[0]
        fields = {"request_id": answer.request_id, "model_id": model_id}
        return json_response({**fields, "sample_sequence_ids": answer.sequence_ids or None})
    if isinstance(answer, CallResult):
        return Response(answer.answer, media_type=PROTOBUF if answer.is_protobuf else "application/json")
    return Response(status_code=204) if answer is None else json_response(answer)


async def _answer_fixed(answer: dict[str, Any], request: Request) -> Response:
    return json_response(answer)


def _make_call(call: Callable[..., Awaitable[Answer]]) -> Callable[..., Awaitable[Response]]:
    takes = get_type_hints(call)

    async def handle(request: Request, given: dict[str, Any]) -> Response:
        api, owner = _find(request)
        if "run" in takes:
            return _respond(await api.submit(owner, call.__name__, given, takes["body"]))
        return _respond(await call(api, owner, takes["body"].model_validate(given, extra="ignore")))

    return handle


async def _look(
    look: Callable[..., Awaitable[Answer]], request: Request, limit: int = 100, offset: int = 0
) -> Response:
    answer = await look(*_find(request), **request.path_params)
    if not isinstance(answer, list):
        return _respond(answer)
    start, number = max(offset, 0), min(max(limit, 0), _MAX_LISTED)
    cursor = {"offset": start, "limit": number, "total_count": len(answer)}
    return json_response({request.url.path.rpartition("/")[2]: answer[start : start + number], "cursor": cursor})


async def _forward_backward(request: Request) -> Response:
    """Its body is protobuf."""
    api, owner = _find(request)
    kind, encoding = request.headers.get("content-type", ""), request.headers.get("content-encoding", "")
    return _respond(await api.forward_backward(owner, await request.body(), kind, encoding))


async def _refuse(request: Request, path: str) -> Response:
    raise HttpError(404, f"this server has no path {path[:200]!r}: it is the hosted service's, or not of SDK 0.38")
