"""Routes for weights as vLLM's own server takes them, and TRL sends them since 1.11: by a packed broadcast.

    /init_weight_transfer_engine   trainer and workers meet; the trainer joins while it waits for the answer
    /start_weight_update
    /update_weights                the workers receive and load; the trainer broadcasts while it waits for the answer
    /finish_weight_update          all that came is one update: the policy version rises, the cache is dropped

Weights are loaded as they come, as vLLM does. What the model cannot have is refused before; an update that ends
half-way leaves an engine that samples nothing and is not healthy, until a whole version comes. Fields that vLLM lacks
are for our own trainer, and stand beside vLLM's, which ignores them.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Response
from pydantic import Field

from unbroken.engines.base import TransferEngine
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


class _InitInfo(BodyModel):
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


class InitBody(BodyModel):
    """A trainer to meet."""

    init_info: _InitInfo
    transport: Annotated[Transport, Field(strict=False)] | None = None
    """Our addition: `nccl` for engines on GPUs by default, `gloo` otherwise."""
    timeout_s: _Seconds | None = None
    """Our addition: longest wait for the trainer, to join (a minute) and for each chunk (five minutes)."""


class _UpdateInfo(BodyModel):
    """The weights that are broadcast next, in this order."""

    names: list[Annotated[str, Field(min_length=1, max_length=4096)]] = Field(default_factory=list)
    """Without names, dtypes and shapes the weights are those of this trainer's last call (vLLM since 0.33)."""
    dtype_names: list[str] = Field(default_factory=list)
    """By torch's name, e.g. `bfloat16`."""
    shapes: list[list[_Size]] = Field(default_factory=list)
    packed: bool | None = None
    """If given, this and the size replace those of `init_info` (vLLM before 0.28)."""
    packed_buffer_size_bytes: _BufferBytes = BUFFER_BYTES

    def read_specs(self) -> list[TensorSpec]:
        """The weights; `HttpError` if the lists have not one entry for each."""
        for name, values in (("dtype_names", self.dtype_names), ("shapes", self.shapes)):
            if len(values) != len(self.names):
                raise HttpError(
                    400,
                    f"update_info.{name} must have one entry for each of the {len(self.names)} names, got "
                    f"{len(values)}",
                    param=f"update_info.{name}",
                )
        return [
            TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
            for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True)
        ]


class StartBody(BodyModel):
    """The begin of an update: all of it is our addition."""

    policy_version: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Refused at once unless it rises above the version in use."""
    update_info: _UpdateInfo | None = None
    """All weights that will come: refused at once if the model cannot have them, or lacks some."""
    reuse_kv: bool = False
    """Keep keys and values that older weights computed."""
    in_flight: Annotated[InFlight, Field(strict=False)] = InFlight.PAUSE
    """`pause`: running requests continue with the new weights. `finish`: they end first."""


class TransferBody(BodyModel):
    """Weights to receive."""

    update_info: _UpdateInfo


class FinishBody(BodyModel):
    """The end of an update."""

    weight_version: Annotated[str, Field(pattern=r"^[0-9]{1,9}$")] | None = None
    """The policy version, by default the next one."""
    digest: Annotated[str, Field(max_length=128)] | None = None
    """Our addition: the engine samples with what came only if it has this digest."""


@router.post("/init_weight_transfer_engine", summary="Meet a trainer (vLLM's form, TRL since 1.11)")
async def _init_weight_transfer_engine(body: InitBody, request: Request) -> Response:
    """Answer once trainer and workers are connected. A second trainer replaces the first."""
    engine = _transfer_engine(request)
    info = body.init_info
    device = (await engine.weight_placement()).device
    timeouts = {} if body.timeout_s is None else {"join_timeout_s": body.timeout_s, "timeout_s": body.timeout_s}
    await engine.transfer.open(
        Rendezvous(
            host=info.master_address,
            port=info.master_port,
            first_rank=info.rank_offset,
            world_size=info.world_size,
            transport=body.transport or (Transport.NCCL if device == "cuda" else Transport.GLOO),
            **timeouts,
        ),
        BufferPacking(packed=info.packed, buffer_bytes=info.packed_buffer_size_bytes),
    )
    return json_response({"message": "the workers are connected to the trainer"})


@router.post("/start_weight_update", summary="Begin an update (vLLM's form)")
async def _start_weight_update(request: Request, body: StartBody | None = None) -> Response:
    """An update that was not finished has failed. The engine samples until weights come."""
    body = body or StartBody()
    await _transfer_engine(request).transfer.start(
        None if body.update_info is None else body.update_info.read_specs(),
        policy_version=body.policy_version,
        in_flight=body.in_flight,
        reuse_kv=body.reuse_kv,
    )
    return json_response({"message": "the update has begun"})


@router.post("/update_weights", summary="Receive weights (vLLM's form)")
async def _update_weights(body: TransferBody, request: Request) -> Response:
    """Answer once they are in the model. The engine samples nothing until the update is finished."""
    info = body.update_info
    own = None if info.packed is None else BufferPacking(packed=info.packed, buffer_bytes=info.packed_buffer_size_bytes)
    await _transfer_engine(request).transfer.receive(info.read_specs(), own)
    return json_response({"message": "the workers have the weights"})


@router.post("/finish_weight_update", summary="Sample with the weights that came (vLLM's form)")
async def _finish_weight_update(request: Request, body: FinishBody | None = None) -> Response:
    """Answer once the engine samples with them. If one is missing, it samples nothing until a whole version comes."""
    body = body or FinishBody()
    receipt = await get_context(request).weights.finish(
        _transfer_engine(request),
        policy_version=None if body.weight_version is None else int(body.weight_version),
        digest=body.digest,
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
async def _shutdown_weight_transfer_engine(request: Request) -> Response:
    """An update that was not finished has failed."""
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
