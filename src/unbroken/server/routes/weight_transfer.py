"""Routes for weights as vLLM's own server takes them, and TRL sends them since 1.11: by a packed broadcast.

    /init_weight_transfer_engine   trainer and workers meet; the trainer joins while it waits for the answer
    /start_weight_update
    /update_weights                the workers receive; the trainer broadcasts while it waits for the answer
    /finish_weight_update          all that came is loaded as one update: the policy version rises, the cache is dropped

vLLM loads each weight as it comes. Here nothing is loaded before the end, so a partial update never is: an error is in
the answer, and the old weights stay in use. Fields that vLLM lacks are for our own trainer, which lets no server load
before all servers have everything: `policy_version`, `last` and `digest`.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Response
from pydantic import Field

from unbroken.engines.base import TransferEngine
from unbroken.engines.checks import check_version_rises
from unbroken.server.context import get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.bodies import BodyModel
from unbroken.server.http.errors import HttpError
from unbroken.server.http.json import json_response
from unbroken.types import InFlight
from unbroken.weights.sources import TensorSpec
from unbroken.weights.wire import BUFFER_BYTES, BufferPacking, Rendezvous, Transport

router = Routes(Access.ADMIN)
_Size = Annotated[int, Field(ge=0, lt=2**40)]
_BufferBytes = Annotated[int, Field(ge=1, lt=2**40)]
_Seconds = Annotated[float, Field(gt=0, le=86400)]


class InitInfo(BodyModel):
    """Where the trainer listens; it has rank 0."""

    master_address: Annotated[str, Field(min_length=1, max_length=255)]
    master_port: Annotated[int, Field(ge=1, lt=2**16)]
    rank_offset: Annotated[int, Field(ge=1, lt=2**20)] = 1
    """Rank of this server's first worker."""
    world_size: Annotated[int, Field(ge=2, lt=2**20)]
    """The trainer, and all workers (`/get_world_size`) of all servers."""
    packed: bool = False
    """Whether weights are sent in chunks (vLLM since 0.28)."""
    packed_buffer_size_bytes: _BufferBytes = BUFFER_BYTES
    transport: Annotated[Transport, Field(strict=False)] | None = None
    """Our addition: `nccl` for engines on GPUs by default, `gloo` otherwise."""
    timeout_s: _Seconds | None = None
    """Our addition: longest wait for the trainer, to join (a minute) and for each chunk (five minutes)."""


class InitBody(BodyModel):
    """A trainer to meet."""

    init_info: InitInfo


class StartBody(BodyModel):
    """The begin of an update."""

    policy_version: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Our addition: refused at once unless it rises above the version in use."""


class UpdateInfo(BodyModel):
    """The weights that are broadcast next, in this order."""

    names: list[Annotated[str, Field(min_length=1, max_length=4096)]] = Field(default_factory=list)
    """Without names, dtypes and shapes the weights are those of this trainer's last call (vLLM since 0.33)."""
    dtype_names: list[str] = Field(default_factory=list)
    """By torch's name, e.g. `bfloat16`."""
    shapes: list[list[_Size]] = Field(default_factory=list)
    packed: bool | None = None
    """If given, this and the size replace those of `init_info` (vLLM before 0.28)."""
    packed_buffer_size_bytes: _BufferBytes = BUFFER_BYTES
    last: bool = False
    """Our addition: the update is whole with these. It is checked as a whole, and its digest is in the answer."""


class TransferBody(BodyModel):
    """Weights to receive."""

    update_info: UpdateInfo


class FinishBody(BodyModel):
    """The end of an update."""

    weight_version: Annotated[str, Field(pattern=r"^[0-9]{1,9}$")] | None = None
    """The policy version, by default the next one."""
    digest: Annotated[str, Field(max_length=128)] | None = None
    """Our addition: nothing is loaded unless what came has this digest."""
    reuse_kv: bool = False
    """Our addition: keep keys and values that older weights computed."""
    in_flight: Annotated[InFlight, Field(strict=False)] = InFlight.PAUSE
    """Our addition. `pause`: running requests continue with the new weights. `finish`: they end first."""


@router.post("/init_weight_transfer_engine", summary="Meet a trainer (vLLM's form, TRL since 1.11)")
async def init_weight_transfer_engine(body: InitBody, request: Request) -> Response:
    """Answer once trainer and workers are connected. A second trainer replaces the first."""
    engine = _transfer_engine(request)
    info = body.init_info
    device = (await engine.weight_placement()).device
    timeouts = {} if info.timeout_s is None else {"join_timeout_s": info.timeout_s, "timeout_s": info.timeout_s}
    await engine.transfer.open(
        Rendezvous(
            host=info.master_address,
            port=info.master_port,
            first_rank=info.rank_offset,
            world_size=info.world_size,
            transport=info.transport or (Transport.NCCL if device == "cuda" else Transport.GLOO),
            **timeouts,
        ),
        BufferPacking(packed=info.packed, buffer_bytes=info.packed_buffer_size_bytes),
    )
    return json_response({"message": "the workers are connected to the trainer"})


@router.post("/start_weight_update", summary="Begin an update (vLLM's form)")
async def start_weight_update(request: Request, body: StartBody | None = None) -> Response:
    """What an update that was not finished has left is dropped."""
    engine = _transfer_engine(request)
    if body is not None and body.policy_version is not None:
        check_version_rises(body.policy_version, current=engine.policy_version)
    await engine.transfer.start()
    return json_response({"message": "the update has begun"})


@router.post("/update_weights", summary="Receive weights (vLLM's form)")
async def update_weights(body: TransferBody, request: Request) -> Response:
    """Answer once the workers have them. They are loaded when the update is finished."""
    transfer = _transfer_engine(request).transfer
    info = body.update_info
    for name, values in (("dtype_names", info.dtype_names), ("shapes", info.shapes)):
        if len(values) != len(info.names):
            raise HttpError(
                400,
                f"update_info.{name} must have one entry for each of the {len(info.names)} names, got {len(values)}",
                param=f"update_info.{name}",
            )
    specs = [
        TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True)
    ]
    own = None if info.packed is None else BufferPacking(packed=info.packed, buffer_bytes=info.packed_buffer_size_bytes)
    digest = await transfer.receive(specs, own, last=info.last)
    return json_response({"message": "the workers have the weights", "digest": digest})


@router.post("/finish_weight_update", summary="Load the weights that came (vLLM's form)")
async def finish_weight_update(request: Request, body: FinishBody | None = None) -> Response:
    """Answer once the engine samples with them. If one is missing, none is loaded."""
    body = body or FinishBody()
    receipt = await get_context(request).weights.finish(
        _transfer_engine(request),
        policy_version=None if body.weight_version is None else int(body.weight_version),
        digest=body.digest,
        reuse_kv=body.reuse_kv,
        in_flight=body.in_flight,
    )
    return json_response(
        {
            "message": "the new weights are in use",
            "policy_version": receipt.policy_version,
            "digest": receipt.digest,
            "seconds": dict(receipt.seconds),
        }
    )


@router.post("/shutdown_weight_transfer_engine", summary="Leave the trainer (vLLM's form)")
async def shutdown_weight_transfer_engine(request: Request) -> Response:
    """What came and is not loaded is dropped."""
    await _transfer_engine(request).transfer.close()
    return json_response({"message": "there is no trainer"})


def _transfer_engine(request: Request) -> TransferEngine:
    engine = get_context(request).service.engine
    if not isinstance(engine, TransferEngine):
        raise HttpError(
            400,
            f"{type(engine).__name__} takes no transfer of weights: serve with --engine vllm, or publish them through "
            "POST /v1/weights",
        )
    return engine
