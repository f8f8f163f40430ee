"""Weights that come parameter by parameter, as TRL sends them: kept by the workers until all are to be loaded.

    open()           answers before the workers are connected to the sender, which joins when it has the answer
    announce(spec)   answers before the parameter is broadcast, for the same reason
    collect()        waits for all parameters: the source of one update

Nothing is loaded before that, so a sender that goes away half-way leaves the old weights in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unbroken.engines.vllm.weights.checkpoint import WeightShapes
from unbroken.engines.vllm.weights.communicator import Communicator
from unbroken.errors import EngineError, SamplingError, WeightsError
from unbroken.transfer.announcement import Transport
from unbroken.transfer.layout import TensorSpec
from unbroken.transfer.sources import ReceivedWeights, Receiver, SharedSource, TiedNames, check_tied

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSource(SharedSource):
    """Parameters that the workers have received one by one."""

    specs: tuple[TensorSpec, ...]
    forget: Callable[[], None] = lambda: None
    """Called when the update is over: the workers have the parameters no longer."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `SharedSource`."""
        return {spec.name: spec.shape for spec in self.specs}

    def to_object(self) -> dict[str, Any]:
        """See `SharedSource`."""
        return {"tensors": [spec.to_object() for spec in self.specs]}

    @staticmethod
    def from_object(fields: Mapping[str, Any]) -> ParameterSource:
        """See `SharedSource`."""
        return ParameterSource(specs=tuple(map(TensorSpec.from_object, fields["tensors"])))

    def close(self) -> None:
        """See `SharedSource`."""
        self.forget()


class ParameterReceiver(Receiver[ParameterSource]):
    """A worker's side."""

    def __init__(self, device: torch.device, *, rank: int = 0) -> None:
        super().__init__(device, rank=rank)
        self._device: torch.device = device
        self._communicator: Communicator | None = None
        self._parameters: dict[str, torch.Tensor] = {}

    def open(self, host: str, port: int, world_size: int, transport: str) -> None:
        """Connect to a sender."""
        self._parameters = {}
        self._communicator = Communicator(
            host=host, port=port, rank=self._rank, world_size=world_size, device=self._device,
            transport=Transport(transport),
        )  # fmt: skip

    def take(self, fields: Mapping[str, Any]) -> None:
        """Receive one parameter, and keep it."""
        assert self._communicator is not None
        spec = TensorSpec.from_object(fields)
        self._parameters[spec.name] = self._communicator.receive(spec)

    def close(self) -> None:
        """Disconnect from the sender, and drop all parameters."""
        self._communicator, self._parameters = None, {}

    def receive(self, source: ParameterSource, *, tied: TiedNames | None = None) -> ReceivedWeights:
        """See `Receiver`: the parameters are here already."""
        kept, self._parameters = self._parameters, {}
        weights = {spec.name: kept[spec.name] for spec in source.specs}
        check_tied(weights, tied)
        return ReceivedWeights(tensors=weights.items())


class WorkerCommunicator:
    """The engine's `ParameterCommunicator`; it calls the workers one call at a time, in order.

    `check` raises `EngineError` unless the engine is awake.
    """

    def __init__(
        self,
        rpc: Callable[..., Awaitable[list[Any]]],
        shapes: Callable[[], Awaitable[WeightShapes]],
        *,
        check: Callable[[], None],
        num_workers: int,
    ) -> None:
        self._rpc = rpc
        self._shapes = shapes
        self._check_awake = check
        self._num_workers = num_workers
        self._specs: dict[str, TensorSpec] = {}
        self._last: asyncio.Task[None] | None = None
        """The newest call to the workers; each waits for the one before it."""
        self._error: str | None = None
        self._is_open = False

    @property
    def has_parameters(self) -> bool:
        """See `ParameterCommunicator`."""
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
        self._call_next("open", host, port, world_size, transport.value)

    async def announce(self, spec: TensorSpec) -> None:
        """See `ParameterCommunicator`."""
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
        self._call_next("take", spec.to_object())

    async def collect(self) -> ParameterSource:
        """See `ParameterCommunicator`; the parameters are kept until an update with them is over."""
        self._check_awake()
        await self._wait_for_calls()
        self._check_error()
        return ParameterSource(specs=tuple(self._specs.values()), forget=self._forget)

    async def close(self) -> None:
        """See `ParameterCommunicator`."""
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
        return await self._rpc("call_receiver", ParameterSource.__name__, method, *args)

    async def _wait_for_calls(self) -> None:
        if self._last is not None:
            await asyncio.shield(self._last)

    def _check_error(self) -> None:
        if self._error is not None:
            raise WeightsError(
                f"the communicator has failed: {self._error}. The old weights are in use: init the communicator again"
            )
