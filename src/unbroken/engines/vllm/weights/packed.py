"""Weights that come by vLLM's packed broadcast, as TRL sends them since 1.11: kept by the workers until all are loaded.

    open(rendezvous)      returns when trainer and workers have met
    start()               begins an update; what an older one left is dropped
    receive(specs)        returns when these weights are here; an update may have several such calls
    collect()             the source of one update

Nothing is loaded before that, so whatever fails leaves the old weights in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from unbroken.engines.vllm.weights.packed_group import PackedGroup
from unbroken.engines.vllm.weights.staged import StagedReceiver, StagedSource, StagedTransfer, Workers
from unbroken.errors import SamplingError, UnbrokenError, WeightsError
from unbroken.transfer.announcement import Transport
from unbroken.transfer.layout import TensorSpec
from unbroken.transfer.packed import BufferPacking, Rendezvous, unpack

if TYPE_CHECKING:
    import torch

_RESERVED_BYTES = 4 * 2**30
"""What received weights leave free on a GPU, for the steps that go on until they are loaded."""


class PackedSource(StagedSource):
    """Weights that the workers have received in chunks."""

    __slots__ = ()


class PackedReceiver(StagedReceiver):
    """A worker's side."""

    def __init__(self, device: torch.device, *, rank: int = 0) -> None:
        super().__init__(device, rank=rank)
        self._group: PackedGroup | None = None

    def open(self, fields: Mapping[str, Any]) -> None:
        """Join a trainer's group, and leave an older one."""
        self.close()
        rendezvous = Rendezvous(**{**fields, "transport": Transport(fields["transport"])})
        self._group = PackedGroup(rendezvous, rank=self._rank, device=self._device)

    def take(self, tensors: Sequence[Mapping[str, Any]], packing: Mapping[str, Any], keep: bool) -> None:
        """Receive weights, and keep them or not. After a failure the group is left, and nothing is kept."""
        if self._group is None:
            raise WeightsError("this worker is in no group")
        try:
            for specs in BufferPacking(**packing).split([TensorSpec.from_object(fields) for fields in tensors]):
                chunk = self._group.receive(sum(spec.num_bytes for spec in specs))
                if keep:
                    self._weights.update(unpack(self._stage(chunk), specs))
        except BaseException:
            self.close()
            raise

    def drop(self) -> None:
        """Forget what came."""
        self._weights = {}

    def close(self) -> None:
        """Leave the group, and forget what came."""
        self.drop()
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _stage(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return the chunk where it can stay: on the GPU while that has room, else in the host's memory."""
        if chunk.device.type != "cuda":
            return chunk
        import torch

        free, _ = torch.cuda.mem_get_info(chunk.device)
        return chunk if free > _RESERVED_BYTES + chunk.numel() else chunk.cpu()


class _State(StrEnum):
    CLOSED = "closed"
    """There is no group."""
    READY = "ready"
    UPDATING = "updating"


class WorkerTransfer(StagedTransfer):
    """The engine's `WeightTransfer`: one call at a time, each finished even if its caller leaves."""

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers)
        self._state = _State.CLOSED
        self._packing = BufferPacking()
        self._last_specs: tuple[TensorSpec, ...] = ()
        """What the last call of `receive` from this trainer was about."""
        self._lock = asyncio.Lock()
        self._calls: set[asyncio.Task[None]] = set()

    async def open(self, rendezvous: Rendezvous, packing: BufferPacking) -> None:
        self._workers.check_awake()
        last = rendezvous.first_rank + self._workers.number
        if rendezvous.first_rank < 1 or last > rendezvous.world_size:
            raise SamplingError(
                f"world_size must count the trainer and all workers, got {rendezvous.world_size} with rank_offset "
                f"{rendezvous.first_rank} for a server of {self._workers.number}"
            )
        await self._run_to_end(self._open(rendezvous, packing))

    async def start(self) -> None:
        self._workers.check_awake()
        await self._run_to_end(self._start())

    async def receive(self, specs: Sequence[TensorSpec], packing: BufferPacking | None = None) -> None:
        self._workers.check_awake()
        await self._run_to_end(self._receive(specs, packing))

    async def collect(self) -> PackedSource:
        self._workers.check_awake()
        async with self._lock:
            self._check_updating()
            return PackedSource(specs=tuple(self._specs.values()), forget=self._forget)

    async def cancel(self, reason: str) -> None:
        if self._state is _State.UPDATING:
            await self._run_to_end(self._fail(reason))

    async def _open(self, rendezvous: Rendezvous, packing: BufferPacking) -> None:
        self._specs, self._state, self._error, self._last_specs = {}, _State.CLOSED, None, ()
        fields = {**asdict(rendezvous), "transport": rendezvous.transport.value}
        await self._call("open", fields)
        self._state, self._packing = _State.READY, packing

    async def _start(self) -> None:
        if self._state is _State.CLOSED:
            raise self._no_group()
        await self._call("drop")
        self._specs, self._state, self._error = {}, _State.UPDATING, None

    async def _receive(self, specs: Sequence[TensorSpec], packing: BufferPacking | None) -> None:
        if self._state is _State.CLOSED:
            raise self._no_group()
        specs = self._last_specs = tuple(specs) or self._last_specs
        if not specs:
            raise SamplingError("update_info.names must not be empty in a trainer's first update")
        tensors = [spec.to_object() for spec in specs]
        refusal = await self._find_refusal(specs)
        # The trainer sends whatever we answer, and would wait forever for workers that do not take part.
        await self._call("take", tensors, asdict(packing or self._packing), refusal is None)
        if refusal is not None:
            if self._error is None and self._state is _State.UPDATING:
                await self._fail(str(refusal))
            raise refusal
        self._specs |= {spec.name: spec for spec in specs}

    async def _find_refusal(self, specs: Sequence[TensorSpec]) -> UnbrokenError | None:
        shapes = await self._workers.shapes()
        seen = set(self._specs)
        try:
            self._check_updating()
            for spec in specs:
                shapes.check_one(spec.name, spec.shape)
                if spec.name in seen:
                    raise SamplingError(f"weight {spec.name!r} came twice")
                seen.add(spec.name)
        except (SamplingError, WeightsError) as error:
            return error
        return None

    async def _fail(self, reason: str) -> None:
        self._error = reason
        self._specs = {}
        await self._call("drop")

    def _forget(self) -> None:
        """Called when an update is over."""
        self._specs = {}
        if self._state is _State.UPDATING:
            self._state = _State.READY

    async def _call(self, method: str, *args: Any) -> None:
        """Call all receivers; `WeightsError` if one fails, after which there is no group."""
        answers = await self._workers.rpc("call_receiver", PackedSource.__name__, method, *args)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            self._specs, self._state, self._error = {}, _State.CLOSED, errors[0]
            await self._workers.rpc("call_receiver", PackedSource.__name__, "close")
            raise WeightsError(f"{errors[0]}. The old weights are in use: POST /init_weight_transfer_engine again")

    def _check_updating(self) -> None:
        if self._state is _State.CLOSED:
            raise self._no_group()
        if self._error is not None:
            raise WeightsError(
                f"this update has failed: {self._error}. The old weights are in use: POST /start_weight_update again"
            )
        if self._state is _State.READY:
            raise SamplingError("there is no update: POST /start_weight_update first")

    def _no_group(self) -> UnbrokenError:
        if self._error is not None:
            return WeightsError(
                f"the transfer has failed: {self._error}. The old weights are in use: POST "
                "/init_weight_transfer_engine again"
            )
        return SamplingError("there is no trainer: POST /init_weight_transfer_engine first")

    async def _run_to_end(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._run_alone(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        await asyncio.shield(task)

    async def _run_alone(self, call: Coroutine[Any, Any, None]) -> None:
        async with self._lock:
            await call
