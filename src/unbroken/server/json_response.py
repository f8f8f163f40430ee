"""Answers: JSON by orjson, or the compact form where the client asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from unbroken import compact

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


def json_bytes(value: Any) -> bytes:
    """`value`, in which numpy arrays may stand, as JSON; a number that is not finite becomes null."""
    return orjson.dumps(value, option=_OPTIONS)


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(json_bytes(value), status_code=status, media_type="application/json", headers=dict(headers or {}))


def negotiated_response(request: Request, value: Any) -> Response:
    """An answer in the compact form if `Accept` names it, else in JSON."""
    if compact.MEDIA_TYPE in request.headers.get("accept", ""):
        return Response(compact.encode(value), media_type=compact.MEDIA_TYPE)
    return json_response(value)
