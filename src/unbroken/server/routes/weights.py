"""New weights for everybody, from files that `weights.files` wrote where the server can read them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import Field

from unbroken.server.context import context_of
from unbroken.server.json_request import OrjsonRoute
from unbroken.server.json_response import json_response
from unbroken.server.wire_types import StrictBody
from unbroken.types import InFlight

router = APIRouter(route_class=OrjsonRoute)


class WeightsBody(StrictBody):
    """A version to load."""

    folder: Annotated[str, Field(min_length=1, max_length=4096)]
    """`version-...` in the server's `--weights-dir`."""
    policy_version: Annotated[int, Field(ge=0, lt=2**31)]
    """The version that the folder holds: higher than the one in use, or that one again."""
    reuse_kv: bool = False
    """Keep keys and values that older weights computed."""
    in_flight: Annotated[InFlight, Field(strict=False)] = InFlight.PAUSE
    """What becomes of requests in flight: with `pause` they wait and go on with the new weights, with `finish` they end
    first, and new ones wait."""


@router.post("/v1/weights", summary="Load a version of the weights")
async def load(request: Request, body: WeightsBody) -> Response:
    """Answers once the engine samples with it; `loaded` is false where it had the version already."""
    context = context_of(request)
    loaded = await context.weights.load(
        Path(body.folder), policy_version=body.policy_version, reuse_kv=body.reuse_kv, in_flight=body.in_flight
    )
    return json_response({"policy_version": context.service.engine.policy_version, "loaded": loaded})
