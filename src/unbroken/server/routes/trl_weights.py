"""Routes for weights as TRL's `VLLMClient` sends them (TRL 1.0 to 1.10): parameter by parameter, over NCCL.

Two routes answer before their work is done, because the client joins the group, or broadcasts, only after the answer.
An error of that work is in the answer to the next call.

The first parameter begins an update of the receiver that `weight_transfer` has too: the engine makes no steps from then
on. TRL resets the prefix cache after the last one, and that finishes it: the policy version rises by one, and requests
in flight continue with the new weights. If one is missing, the engine samples nothing until a whole version comes.
"""

from __future__ import annotations

from typing import Annotated, TypeGuard

from fastapi import Request, Response
from pydantic import Field

from unbroken.engines.base import Engine, TransferEngine
from unbroken.engines.checks import require_pausable
from unbroken.server.context import get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.bodies import BodyModel
from unbroken.server.http.errors import HttpError
from unbroken.server.http.json import json_response
from unbroken.weights.sources import TensorSpec
from unbroken.weights.wire import Transport

router = Routes(Access.ADMIN)


class CommunicatorBody(BodyModel):
    """Where rank 0 of the workers listens; the client has the last rank."""

    host: Annotated[str, Field(min_length=1, max_length=255)]
    port: Annotated[int, Field(ge=1, lt=2**16)]
    world_size: Annotated[int, Field(ge=2, lt=2**20)]
    """The workers (`/get_world_size/`) and the client."""
    client_device_uuid: str = ""
    """The client's GPU; no worker may have the same."""
    transport: Annotated[Transport, Field(strict=False)] = Transport.NCCL
    """Our addition: `gloo` is for engines on a CPU."""


class ParameterBody(BodyModel):
    """The parameter that is broadcast next."""

    name: Annotated[str, Field(min_length=1, max_length=4096)]
    dtype: str
    """E.g. `torch.bfloat16`."""
    shape: list[Annotated[int, Field(ge=0, lt=2**40)]]


@router.post("/init_communicator", summary="Meet a sender of weights (TRL)")
@router.post("/init_communicator/", include_in_schema=False)
async def _init_communicator(body: CommunicatorBody, request: Request) -> Response:
    """Answer at once; then the workers wait a minute for the client."""
    engine = _communicator_engine(request)
    placement = await engine.weight_placement()
    device = placement.device
    if body.transport is Transport.NCCL and device != "cuda":
        raise HttpError(
            400,
            f"the communicator needs GPUs (NCCL), and this server's engine is on {device}: publish weights through "
            "POST /v1/weights",
            param="transport",
        )
    if body.client_device_uuid and body.client_device_uuid in placement.gpu_uuids:
        raise HttpError(
            400,
            f"client_device_uuid must be a GPU that no worker has, got {body.client_device_uuid}",
            param="client_device_uuid",
        )
    await engine.transfer.open_later(
        host=body.host, port=body.port, world_size=body.world_size, transport=body.transport.value
    )
    return json_response({"message": "the workers wait for the client"})


@router.post("/update_named_param", summary="Receive a parameter (TRL)")
@router.post("/update_named_param/", include_in_schema=False)
async def _update_named_param(body: ParameterBody, request: Request) -> Response:
    """Answer at once; then the client broadcasts. All are one version when the prefix cache is reset."""
    spec = TensorSpec(name=body.name, dtype=body.dtype.removeprefix("torch."), shape=tuple(body.shape))
    await _communicator_engine(request).transfer.receive_later(spec)
    return json_response({"message": "the workers wait for the parameter"})


@router.post("/close_communicator", summary="Leave a sender of weights (TRL)")
@router.post("/close_communicator/", include_in_schema=False)
async def _close_communicator(request: Request) -> Response:
    """An update that was not finished has failed."""
    engine = get_context(request).service.engine
    if _takes_parameters(engine):
        await engine.transfer.close()
    return json_response({"message": "there is no communicator"})


@router.post("/reset_prefix_cache", summary="Load the parameters that came, and forget cached keys and values")
@router.post("/reset_prefix_cache/", include_in_schema=False)
async def _reset_prefix_cache(request: Request) -> Response:
    """`loaded` says whether there were parameters to load: TRL's client ends an update with this call."""
    context = get_context(request)
    engine = context.service.engine
    loaded = _takes_parameters(engine) and engine.transfer.takes_reset
    if _takes_parameters(engine) and loaded:  # an update drops keys and values, too
        await context.weights.finish(engine, policy_version=None, digest=None)
    else:
        await require_pausable(engine).reset_prefix_cache()
    return json_response(
        {"message": "the prefix cache is empty", "loaded": loaded, "policy_version": engine.policy_version}
    )


def _takes_parameters(engine: Engine) -> TypeGuard[TransferEngine]:
    return isinstance(engine, TransferEngine) and engine.transfer.takes_parameters


def _communicator_engine(request: Request) -> TransferEngine:
    engine = get_context(request).service.engine
    if not _takes_parameters(engine):
        raise HttpError(
            400,
            f"{type(engine).__name__} takes no weights over a communicator: serve with --engine vllm, or publish them "
            "through POST /v1/weights, or by /init_weight_transfer_engine",
        )
    return engine
