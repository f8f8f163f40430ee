"""Routes for new weights from files that `weights.files` wrote; those for a broadcast are in `weight_transfer`."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Response
from pydantic import Field

from unbroken.server.context import get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.bodies import StrictBody
from unbroken.server.http.json import json_response
from unbroken.types import InFlight

router = Routes(Access.ADMIN)

Version = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=4096)]


class WeightsBody(StrictBody):
    """A version to load."""

    folder: Name
    """`version-...` in the server's `--weights-dir`, or in the store of its `--versions-from`."""
    policy_version: Version
    """Higher than the one in use."""
    reuse_kv: bool = False
    """Keep keys and values that older weights computed."""
    in_flight: Annotated[InFlight, Field(strict=False)] = InFlight.PAUSE
    """`pause`: running requests continue with the new weights. `finish`: they end first, and new ones wait."""


@router.get("/v1/weights", summary="State of the weights, for a sender")
async def _state(request: Request) -> Response:
    """The version in use, its digest, the number of workers, and the weights' dtype and devices."""
    return json_response(await get_context(request).weights.state())


@router.post("/v1/weights", summary="Load a version of the weights")
async def _load(request: Request, body: WeightsBody) -> Response:
    """Answer once the engine samples with it; `loaded` is false if it had the version already."""
    context = get_context(request)
    loaded = await context.weights.load(
        body.folder, policy_version=body.policy_version, reuse_kv=body.reuse_kv, in_flight=body.in_flight
    )
    return json_response({"policy_version": context.service.engine.policy_version, "loaded": loaded})
