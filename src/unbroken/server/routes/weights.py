"""Routes for new weights: from files that `weights.files` wrote, or by broadcast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import Request, Response
from pydantic import Field

from unbroken.server.context import get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.bodies import StrictBody
from unbroken.server.http.json import json_response
from unbroken.transfer.announcement import Announcement, Staging, Transport
from unbroken.types import InFlight

router = Routes(Access.ADMIN)

Version = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=4096)]
Size = Annotated[int, Field(ge=0, lt=2**62)]


class UpdateBody(StrictBody):
    """Fields of every update."""

    policy_version: Version
    """Higher than the one in use."""
    reuse_kv: bool = False
    """Keep keys and values that older weights computed."""
    in_flight: Annotated[InFlight, Field(strict=False)] = InFlight.PAUSE
    """`pause`: running requests continue with the new weights. `finish`: they end first, and new ones wait."""


class WeightsBody(UpdateBody):
    """A version to load."""

    folder: Name
    """`version-...` in the server's `--weights-dir`."""


class MeetingBody(StrictBody):
    """Where trainer and workers form a group."""

    host: Name
    port: Annotated[int, Field(ge=1, lt=2**16)]
    group_id: Name
    transport: Annotated[Transport, Field(strict=False)]
    world_size: Annotated[int, Field(ge=2, lt=2**20)]
    """The trainer, and all workers of all servers."""
    first_rank: Annotated[int, Field(ge=1, lt=2**20)]
    """Rank of this server's first worker; the trainer has rank 0."""


class TensorBody(StrictBody):
    """One of the weights."""

    name: Name
    dtype: Name
    """On the wire, by torch's name: `bfloat16`."""
    shape: list[Size]


class CollectiveBody(UpdateBody):
    """A broadcast to take part in."""

    update_id: Name
    tensors: list[TensorBody]
    """In the order of the wire."""
    bucket_bytes: Annotated[int, Field(ge=16, lt=2**40)]
    meeting: MeetingBody
    staging: Annotated[Staging, Field(strict=False)] = Staging.DEVICE
    timeout_s: Annotated[float, Field(gt=0, le=86400)]


@router.get("/v1/weights", summary="State of the weights, for a sender")
async def state(request: Request) -> Response:
    """The version in use, its digest, the number of workers, and the weights' dtype and devices."""
    return json_response(await get_context(request).weights.state())


@router.post("/v1/weights", summary="Load a version of the weights")
async def load(request: Request, body: WeightsBody) -> Response:
    """Answer once the engine samples with it; `loaded` is false if it had the version already."""
    context = get_context(request)
    loaded = await context.weights.load(
        Path(body.folder), policy_version=body.policy_version, reuse_kv=body.reuse_kv, in_flight=body.in_flight
    )
    return json_response({"policy_version": context.service.engine.policy_version, "loaded": loaded})


@router.post("/v1/weights/collective", summary="Receive a version of the weights")
async def receive(request: Request, body: CollectiveBody) -> Response:
    """Answer once the engine samples with the new weights; `seconds` has the duration of the parts."""
    announcement = Announcement.from_object(body.model_dump())
    receipt = await get_context(request).weights.receive(announcement, reuse_kv=body.reuse_kv, in_flight=body.in_flight)
    return json_response(
        {"policy_version": receipt.policy_version, "digest": receipt.digest, "seconds": dict(receipt.seconds)}
    )
