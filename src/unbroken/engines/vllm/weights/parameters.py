"""Weights that come parameter by parameter, as TRL (1.0 to 1.10) sends them: kept until all are to be loaded.

    open()           answers before the workers are connected to the sender, which joins when it has the answer
    announce(spec)   answers before the parameter is broadcast, for the same reason
    collect()        waits for all parameters: the source of one update

Nothing is loaded before that, so a sender that goes away half-way leaves the old weights in use. There is one broadcast
and one barrier for each parameter, from the last rank, over vLLM's `StatelessProcessGroup` and `PyNcclCommunicator`, as
TRL's `VLLMClient` makes them (TRL's PRs #5225, #5227, #5228). TRL has no gloo; here it serves machines without GPUs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import torch

from unbroken.engines.vllm.weights.checkpoint import WeightShapes
from unbroken.errors import EngineError, SamplingError, WeightsError
from unbroken.transfer.packed import PackedReceiver, Transport, make_gloo_broadcast
from unbroken.transfer.sources import StagedSource, TensorSpec

_JOIN_TIMEOUT_S = 60
_BROADCAST_TIMEOUT_S = 60


class ParameterSource(StagedSource):
    """Parameters that the workers have received one by one."""

    __slots__ = ()


class ParameterReceiver(PackedReceiver):
    """A worker's side; the sender has the last rank."""

    _communicator: Any = None
    """vLLM's group, and what broadcasts a tensor in it."""

    def open(self, fields: Mapping[str, Any]) -> str:
        """Connect to a sender; `RuntimeError` if another member does not join within a minute."""
        from vllm.distributed.utils import StatelessProcessGroup

        self.drop()
        size = fields["world_size"]
        group = StatelessProcessGroup.create(
            host=fields["host"], port=fields["port"], rank=self._rank, world_size=size, store_timeout=_JOIN_TIMEOUT_S
        )
        if Transport(fields["transport"]) is Transport.NCCL:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

            self._communicator = group, partial(PyNcclCommunicator(group, device=self._device).broadcast, src=size - 1)
        else:
            gloo = make_gloo_broadcast(group, source=size - 1, timeout_s=_BROADCAST_TIMEOUT_S)
            self._communicator = group, gloo
        return ""

    def take_one(self, fields: Mapping[str, Any]) -> None:
        """Receive one parameter, and keep it; `RuntimeError` if the sender or another worker is gone."""
        group, broadcast = self._communicator
        spec = TensorSpec.from_object(fields)
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
        broadcast(tensor)
        group.barrier()
        self._weights[spec.name] = tensor

    def close(self) -> None:
        """Disconnect from the sender, and drop all parameters."""
        self._communicator = None
        self.drop()


class WorkerCommunicator:
    """The engine's `ParameterCommunicator`; it calls the workers one call at a time, in order."""

    def __init__(
        self,
        rpc: Callable[..., Awaitable[list[Any]]],
        *,
        shapes: Callable[[], Awaitable[WeightShapes]],
        check_awake: Callable[[], None],
        num_workers: int,
    ) -> None:
        """`rpc` calls a method of `WorkerExtension` in each worker; `check_awake` raises unless the engine is awake."""
        self._rpc = rpc
        self._shapes = shapes
        self._check_awake = check_awake
        self._num_workers = num_workers
        self._specs: dict[str, TensorSpec] = {}
        """What the workers keep, by name."""
        self._error: str | None = None
        """Why the weights will not come."""
        self._last: asyncio.Task[None] | None = None
        """The newest call to the workers; each waits for the one before it."""
        self._is_open = False

    @property
    def has_parameters(self) -> bool:
        return bool(self._specs)

    async def open(self, *, host: str, port: int, world_size: int, transport: Transport, sender_uuid: str = "") -> None:
        """See `ParameterCommunicator`; an older connection is closed."""
        self._check_awake()
        if world_size != self._num_workers + 1:
            raise SamplingError(
                f"world_size must be {self._num_workers + 1}, the engine's workers and the sender, got {world_size}"
            )
        if sender_uuid and sender_uuid in await self._rpc("device_uuid"):
            raise SamplingError(f"client_device_uuid must be a GPU that no worker has, got {sender_uuid}")
        await self.close()
        self._is_open = True
        self._call_next("open", {"host": host, "port": port, "world_size": world_size, "transport": transport.value})

    async def announce(self, spec: TensorSpec) -> None:
        self._check_awake()
        if not self._is_open:
            raise SamplingError("there is no communicator: POST /init_communicator/ first")
        self._check_error()
        (await self._shapes()).check_one(spec.name, spec.shape)
        if spec.name in self._specs:
            raise SamplingError(
                f"weight {spec.name!r} came twice: reset the prefix cache when an update is whole, which loads it"
            )
        self._specs[spec.name] = spec
        self._call_next("take_one", spec.to_object())

    async def collect(self) -> ParameterSource:
        """See `ParameterCommunicator`; the parameters are kept until an update with them is over."""
        self._check_awake()
        await self._wait_for_calls()
        self._check_error()
        return ParameterSource(specs=tuple(self._specs.values()), forget=self._forget)

    async def close(self) -> None:
        await self._wait_for_calls()
        self._error = None
        self._forget()
        if self._is_open:
            self._is_open = False
            await self._call("close")

    def _forget(self) -> None:
        self._specs = {}

    def _call_next(self, method: str, *args: Any) -> None:
        self._last = asyncio.create_task(self._call_after(self._last, method, args))

    async def _call_after(self, before: asyncio.Task[None] | None, method: str, args: tuple[Any, ...]) -> None:
        if before is not None:
            await before
        if self._error is not None:
            return
        try:
            for found in await self._call(method, *args):
                self._error = self._error or found.get("error")
        except EngineError as error:
            self._error = str(error)

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return await self._rpc("call_receiver", ParameterSource.__name__, method, *args)

    async def _wait_for_calls(self) -> None:
        if self._last is not None:
            await asyncio.shield(self._last)

    def _check_error(self) -> None:
        if self._error is not None:
            raise WeightsError(
                f"the communicator has failed: {self._error}. The old weights are in use: init the communicator again"
            )
