"""Weights that come parameter by parameter, as TRL sends them: kept by the workers until all are to be loaded.

    open()           answers before the workers are connected to the sender, which joins when it has the answer
    announce(spec)   answers before the parameter is broadcast, for the same reason
    collect()        waits for all parameters: the source of one update

Nothing is loaded before that, so a sender that goes away half-way leaves the old weights in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unbroken.engines.vllm.weights.communicator import Communicator
from unbroken.engines.vllm.weights.staged import StagedReceiver, StagedSource, StagedTransfer, Workers
from unbroken.errors import EngineError, SamplingError, WeightsError
from unbroken.transfer.announcement import Transport
from unbroken.transfer.layout import TensorSpec

if TYPE_CHECKING:
    import torch


class ParameterSource(StagedSource):
    """Parameters that the workers have received one by one."""

    __slots__ = ()


class ParameterReceiver(StagedReceiver):
    """A worker's side."""

    def __init__(self, device: torch.device, *, rank: int = 0) -> None:
        super().__init__(device, rank=rank)
        self._communicator: Communicator | None = None

    def open(self, host: str, port: int, world_size: int, transport: str) -> None:
        """Connect to a sender."""
        self._weights = {}
        self._communicator = Communicator(
            host=host, port=port, rank=self._rank, world_size=world_size, device=self._device,
            transport=Transport(transport),
        )  # fmt: skip

    def take(self, fields: Mapping[str, Any]) -> None:
        """Receive one parameter, and keep it."""
        assert self._communicator is not None
        spec = TensorSpec.from_object(fields)
        self._weights[spec.name] = self._communicator.receive(spec)

    def close(self) -> None:
        """Disconnect from the sender, and drop all parameters."""
        self._communicator, self._weights = None, {}


class WorkerCommunicator(StagedTransfer):
    """The engine's `ParameterCommunicator`; it calls the workers one call at a time, in order."""

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers)
        self._last: asyncio.Task[None] | None = None
        """The newest call to the workers; each waits for the one before it."""
        self._is_open = False

    @property
    def has_parameters(self) -> bool:
        return bool(self._specs)

    async def open(self, *, host: str, port: int, world_size: int, transport: Transport, sender_uuid: str = "") -> None:
        """See `ParameterCommunicator`; an older connection is closed."""
        self._workers.check_awake()
        if world_size != self._workers.number + 1:
            raise SamplingError(
                f"world_size must be {self._workers.number + 1}, the engine's workers and the sender, got {world_size}"
            )
        if sender_uuid and sender_uuid in await self._workers.rpc("device_uuid"):
            raise SamplingError(f"client_device_uuid must be a GPU that no worker has, got {sender_uuid}")
        await self.close()
        self._is_open = True
        self._call_next("open", host, port, world_size, transport.value)

    async def announce(self, spec: TensorSpec) -> None:
        self._workers.check_awake()
        if not self._is_open:
            raise SamplingError("there is no communicator: POST /init_communicator/ first")
        self._check_error()
        (await self._workers.shapes()).check_one(spec.name, spec.shape)
        if spec.name in self._specs:
            raise SamplingError(
                f"weight {spec.name!r} came twice: reset the prefix cache when an update is whole, which loads it"
            )
        self._specs[spec.name] = spec
        self._call_next("take", spec.to_object())

    async def collect(self) -> ParameterSource:
        """See `ParameterCommunicator`; the parameters are kept until an update with them is over."""
        self._workers.check_awake()
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
            for answer in await self._call(method, *args):
                self._error = self._error or answer.get("error")
        except EngineError as error:
            self._error = str(error)

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return await self._workers.rpc("call_receiver", ParameterSource.__name__, method, *args)

    async def _wait_for_calls(self) -> None:
        if self._last is not None:
            await asyncio.shield(self._last)

    def _check_error(self) -> None:
        if self._error is not None:
            raise WeightsError(
                f"the communicator has failed: {self._error}. The old weights are in use: init the communicator again"
            )
