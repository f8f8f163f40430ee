"""Weights as TRL's `VLLMClient` sends them (TRL 1.0 to 1.10): parameter by parameter, over NCCL.

Two of these answer before they have done what they were asked: the client comes to the rendezvous, or broadcasts, only
when it has the answer. What fails then is told in the answer to the next call.

Parameters are kept aside as they come. TRL resets the prefix cache after the last one, and this is where all of them
are loaded, as one update: the policy version rises by one, and requests in flight go on with the new weights. An update
that is never whole is never loaded.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import Field

from unbroken.engines.base import ParameterReceiver
from unbroken.server.context import context_of
from unbroken.server.http.bodies import Body
from unbroken.server.http.errors import HttpError
from unbroken.server.http.json import OrjsonRoute, json_response
from unbroken.transfer.announcement import Transport
from unbroken.transfer.layout import TensorSpec

router = APIRouter(route_class=OrjsonRoute)


class CommunicatorBody(Body):
    """Where the workers meet the client, who is the last rank; rank 0 listens there."""

    host: Annotated[str, Field(min_length=1, max_length=255)]
    port: Annotated[int, Field(ge=1, lt=2**16)]
    world_size: Annotated[int, Field(ge=2, lt=2**20)]
    """The workers (`/get_world_size/`) and the client."""
    client_device_uuid: str = ""
    """The client's GPU, which must be none of the workers'."""
    transport: Annotated[Transport, Field(strict=False)] = Transport.NCCL
    """Ours: `gloo` is the same for engines on a CPU."""


class ParameterBody(Body):
    """A parameter that is broadcast next."""

    name: Annotated[str, Field(min_length=1, max_length=4096)]
    dtype: str
    """`torch.bfloat16`, say."""
    shape: list[Annotated[int, Field(ge=0, lt=2**40)]]


@router.post("/init_communicator", summary="Meet a sender of weights (TRL)")
@router.post("/init_communicator/", include_in_schema=False)
async def init_communicator(body: CommunicatorBody, request: Request) -> Response:
    """Answers at once; then the workers wait a minute for the client."""
    engine = _receiver(request)
    if body.transport is Transport.NCCL and engine.weight_device != "cuda":
        raise HttpError(
            400,
            f"the communicator needs GPUs (NCCL), and this server's engine is on {engine.weight_device}: publish "
            "weights through POST /v1/weights or /v1/weights/collective",
            param="transport",
        )
    await engine.open_communicator(
        host=body.host,
        port=body.port,
        world_size=body.world_size,
        transport=body.transport,
        sender_uuid=body.client_device_uuid,
    )
    return json_response({"message": "the workers wait for the client"})


@router.post("/update_named_param", summary="Receive a parameter (TRL)")
@router.post("/update_named_param/", include_in_schema=False)
async def update_named_param(body: ParameterBody, request: Request) -> Response:
    """Answers at once; then the client broadcasts. It is loaded with all others, when the prefix cache is reset."""
    spec = TensorSpec(name=body.name, dtype=body.dtype.removeprefix("torch."), shape=tuple(body.shape))
    await _receiver(request).announce_parameter(spec)
    return json_response({"message": "the workers wait for the parameter"})


@router.post("/close_communicator", summary="Leave a sender of weights (TRL)")
@router.post("/close_communicator/", include_in_schema=False)
async def close_communicator(request: Request) -> Response:
    """Parameters that were not loaded are dropped."""
    engine = context_of(request).service.engine
    if isinstance(engine, ParameterReceiver):
        await engine.close_communicator()
    return json_response({"message": "there is no communicator"})


@router.post("/reset_prefix_cache", summary="Load the parameters that came, and forget cached keys and values")
@router.post("/reset_prefix_cache/", include_in_schema=False)
async def reset_prefix_cache(request: Request) -> Response:
    """`loaded` says whether there were any parameters, which end an update of TRL's client."""
    engine = context_of(request).service.engine
    loaded = isinstance(engine, ParameterReceiver) and await engine.load_parameters()
    if not loaded:  # an update forgets them, too
        await engine.reset_prefix_cache()
    return json_response(
        {"message": "the prefix cache is empty", "loaded": loaded, "policy_version": engine.policy_version}
    )


def _receiver(request: Request) -> ParameterReceiver:
    engine = context_of(request).service.engine
    if not isinstance(engine, ParameterReceiver):
        raise HttpError(
            400,
            f"{type(engine).__name__} takes no weights over a communicator: serve with --engine vllm, or publish them "
            "through POST /v1/weights or /v1/weights/collective",
        )
    return engine
