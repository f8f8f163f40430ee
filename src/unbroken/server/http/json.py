"""JSON bodies by orjson, a tenth of the time for long lists of ids; answers in the compact form on request."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from unbroken import compact
from unbroken.errors import InvalidInputError
from unbroken.server.http.ignored import find_ignored, list_models
from unbroken.types.arrays import MAX_DEPTH, is_deep
from unbroken.untrusted import MAX_VALUES, count_opened, count_values, parse_exactly

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
_IGNORED = "unbroken.ignored"
"""Where the scope has the fields of the body that are ignored."""
_IS_COMPACT = "unbroken.compact"
"""Where it says that the body is in the compact form."""
_TYPE = b"content-type"
_PROMPTS = ("prompts", "prompt", "sequences")
SESSION = "unbroken.session"
"""Where the scope has the id of the session that a request belongs to."""
COMPACT_PATH = "/v1/sample"
"""The only path that takes bodies in the compact form."""
IGNORED_HEADER = "X-Unbroken-Ignored"
"""The header of an answer, streams too, that names them."""
_MAX_NAME_LENGTH = 100
"""In letters: a name is the client's, and clients read 8 KiB of a header."""


def encode_json(value: Any) -> bytes:
    """Encode a value, numpy arrays in it included, as JSON. Numbers that are not finite become null."""
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except TypeError:  # an integer beyond 64 bits: a model may write one as the argument of a call
        return json.dumps(_to_plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _to_plain(value: Any) -> Any:
    """The value as Python's own encoder takes it, and with null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return _to_plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer in JSON."""
    return Response(encode_json(value), status_code=status, media_type="application/json", headers=dict(headers or {}))


def negotiated_response(request: Request, value: Any) -> Response:
    """Answer in the compact form if the header `Accept` names it, else in JSON."""
    if compact.MEDIA_TYPE in request.headers.get("accept", ""):
        return Response(compact.encode(value), media_type=compact.MEDIA_TYPE)
    return json_response(value)


def note_ignored(request: Request, names: Sequence[str]) -> None:
    """Name these fields in the header of the answer, after those that are named already."""
    request.scope[_IGNORED] = [*request.scope.get(_IGNORED, ()), *names]


def _escape_name(name: str) -> str:
    """A name that a client chose, as a header may have it: in ASCII, escaped as in JSON, and cut if it is long."""
    escaped = json.dumps(name)[1:-1]
    return escaped if len(escaped) <= _MAX_NAME_LENGTH else f"{escaped[:_MAX_NAME_LENGTH]}..."


class OrjsonRoute(APIRoute):
    """A route whose body is read by orjson or as compact form, and whose answer names the fields that it ignores."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Make the handler, which reads bodies by orjson."""
        handle = super().get_route_handler()
        models = [model for field in self.dependant.body_params for model in list_models(field.field_info.annotation)]

        async def handle_with_orjson(request: Request) -> Response:
            scope = request.scope
            if self.path == COMPACT_PATH and (_TYPE, compact.MEDIA_TYPE.encode()) in scope["headers"]:
                scope[_IS_COMPACT] = True  # and FastAPI reads bodies of JSON only
                others = [pair for pair in scope["headers"] if pair[0] != _TYPE]
                scope["headers"] = [*others, (_TYPE, b"application/json")]
            parsed = _OrjsonRequest(scope, request.receive)
            response = await handle(parsed)
            if models:
                note_ignored(request, find_ignored(parsed.value, models))
            if names := request.scope.get(_IGNORED):
                response.headers[IGNORED_HEADER] = ", ".join(_escape_name(name) for name in names)
            return response

        return handle_with_orjson


class _OrjsonRequest(Request):
    value: Any = None
    """The body, once it is parsed."""

    async def json(self) -> Any:
        """Parse the body (UTF-8, finite numbers only, at most `MAX_DEPTH` levels and `MAX_VALUES`); None if empty."""
        body = await self.body()
        context, session_id = self.app.state.context, self.scope.get(SESSION)
        max_prompts = context.config.limits.max_prompts
        if body and self.scope.get(_IS_COMPACT):
            self.value = _parse(body, lambda: compact.decode(body, parse=_parse_numbers, max_arrays=max_prompts))
            _check_arrays(self.value)
        elif session_id is None:
            self.value = _parse_json(body)
        else:
            self.value = context.bodies.parse(session_id, body, max_values=MAX_VALUES)
            if self.value is None:
                self.value = _parse_json(body)
                context.bodies.learn(session_id, body, self.value)
        _check_num_prompts(self.value, max_prompts)
        return self.value


def _parse_json(body: bytes) -> Any:
    return _parse(body, lambda: _parse_numbers(body) if body else None)


def _parse_numbers(text: bytes) -> Any:
    return parse_exactly(text, orjson.loads)


def _parse(body: bytes, parse: Callable[[], Any]) -> Any:
    """Parse a body of bounded size: what is counted before, a parser would make up to fifty times as large."""
    num_opened = count_opened(body)
    if count_values(body, num_opened) > MAX_VALUES:
        raise HTTPException(400, f"the body must have at most {MAX_VALUES} lists, objects and texts, got more")
    try:
        value = parse()
    except InvalidInputError as error:
        raise HTTPException(400, str(error)) from None
    if num_opened > MAX_DEPTH and is_deep(value):
        raise HTTPException(400, f"the body must be nested in at most {MAX_DEPTH} levels, got more")
    return value


def _check_num_prompts(value: Any, most: int) -> None:
    """Check how many prompts there are before the ids of each are looked at, which takes seconds for 400,000."""
    for name in _PROMPTS if isinstance(value, dict) else ():
        prompts = value.get(name)
        if isinstance(prompts, list) and len(prompts) > most and isinstance(prompts[0], (list, str)):
            raise HTTPException(
                400, f"{name}: a request may have at most {most} prompts (max_prompts), got {len(prompts)}"
            )


def _check_arrays(value: Any) -> None:
    """Check that arrays stand only for the ids of prompts: no other field has a rule for them."""
    prompts = value.get("prompts") if isinstance(value, dict) else None
    arrays = [item for item in prompts if isinstance(item, np.ndarray)] if isinstance(prompts, list) else []
    for array in arrays:
        if array.dtype != np.int32 or array.ndim != 1:
            raise HTTPException(
                400, f"an array in prompts must be one-dimensional int32, got {array.dtype} of shape {array.shape}"
            )
    if _count_arrays(value) != len(arrays):
        raise HTTPException(400, "a compact body must have arrays only as items of prompts, got another")


def _count_arrays(value: Any) -> int:
    if isinstance(value, (dict, list)):
        return sum(map(_count_arrays, value.values() if isinstance(value, dict) else value))
    return isinstance(value, np.ndarray)
