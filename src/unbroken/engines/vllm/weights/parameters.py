"""Weights that come parameter by parameter, as TRL sends them: kept by the workers until they are to be loaded.

    open()           answers before the workers have met the sender, who comes when he has the answer
    announce(spec)   answers before the parameter is broadcast, for the same reason
    whole()          all parameters have come: what is to be loaded as one update

Nothing is loaded before that, so a sender who goes away half-way leaves the old weights in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from unbroken.engines.vllm.weights.checkpoint import WeightShapes
from unbroken.engines.vllm.weights.updates import Rpc
from unbroken.errors import EngineError, SamplingError, WeightsError
from unbroken.transfer.announcement import Transport
from unbroken.transfer.layout import TensorSpec


class ParametersSent:
    """The weights of one update, which the workers have."""

    def __init__(self, names: list[str], tied: tuple[str, str] | None) -> None:
        self._names = names
        self._tied = tied

    async def receive(self, rpc: Rpc) -> None:
        """See `NewWeights`: they are there, and looked at once more."""
        for answer in await rpc("check_parameters", self._names, self._tied):
            if "error" in answer:
                raise WeightsError(answer["error"])

    async def load(self, rpc: Rpc) -> None:
        """See `NewWeights`."""
        await rpc("load_parameters", self._names, self._tied)


class ParameterUpdates:
    """What an engine does for a sender of single parameters. Calls to the workers are made one after the other."""

    def __init__(self, rpc: Rpc, shapes: Callable[[], Awaitable[WeightShapes]]) -> None:
        self._rpc = rpc
        self._shapes = shapes
        self._specs: dict[str, TensorSpec] = {}
        self._last: asyncio.Task[None] | None = None
        """The newest call to the workers; each waits for the one before it."""
        self._error: str | None = None
        self._is_open = False

    @property
    def are_pending(self) -> bool:
        """Whether parameters have come that are not loaded."""
        return bool(self._specs)

    async def open(self, *, host: str, port: int, world_size: int, transport: Transport) -> None:
        """Have the workers meet a sender; an older one is left."""
        await self.close()
        self._is_open = True
        self._then("open_communicator", host, port, world_size, transport.value)

    async def announce(self, spec: TensorSpec) -> None:
        """Have the workers receive a parameter.

        Raises:
            SamplingError: there is no communicator, or the model has no such weight.
            WeightsError: what was asked for before failed.
        """
        if not self._is_open:
            raise SamplingError("there is no communicator: POST /init_communicator/ first")
        self._check_error()
        (await self._shapes()).check_one(spec.name, spec.shape)
        if spec.name in self._specs:
            raise SamplingError(
                f"weight {spec.name!r} came twice: reset the prefix cache when an update is whole, which loads it"
            )
        self._specs[spec.name] = spec
        self._then("receive_parameter", spec.name, spec.dtype, list(spec.shape))

    async def whole(self) -> ParametersSent:
        """All that has come, to be loaded.

        Raises:
            SamplingError: weights are missing; what has come is kept.
            WeightsError: a parameter did not come.
        """
        await self._settled()
        self._check_error()
        shapes = await self._shapes()
        sent = ((spec.name, spec.shape) for spec in self._specs.values())
        return ParametersSent(shapes.checkpoint_names(sent), shapes.tied)

    def forget(self) -> None:
        """They are loaded."""
        self._specs = {}

    async def close(self) -> None:
        """Leave the sender, and drop what is not loaded."""
        await self._settled()
        self._specs, self._error = {}, None
        if self._is_open:
            self._is_open = False
            await self._rpc("close_communicator")

    def _then(self, method: str, *args: object) -> None:
        self._last = asyncio.create_task(self._call(self._last, method, args))

    async def _call(self, before: asyncio.Task[None] | None, method: str, args: tuple[object, ...]) -> None:
        if before is not None:
            await before
        if self._error is not None:
            return
        try:
            for answer in await self._rpc(method, *args):
                if "error" in answer:
                    self._error = answer["error"]
        except EngineError as error:
            self._error = str(error)

    async def _settled(self) -> None:
        if self._last is not None:
            await asyncio.shield(self._last)

    def _check_error(self) -> None:
        if self._error is not None:
            raise WeightsError(
                f"the communicator has failed: {self._error}. The old weights are in use: init the communicator again"
            )
