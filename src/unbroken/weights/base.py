"""How new weights reach a policy: what takes them and what publishes them, in this process or beyond."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from unbroken.errors import InvalidInputError
from unbroken.types import InFlight, WeightPlacement, WeightReceipt
from unbroken.weights.sources import TensorSource, WeightSource, WeightStream

if TYPE_CHECKING:
    import torch


@runtime_checkable
class TakesWeights(Protocol):
    """What holds a policy whose weights are replaced while it is in use: an `UpdatableEngine`."""

    @property
    def policy_version(self) -> int:
        """The version of the weights in use; 0 before the first update (I6)."""
        ...

    @property
    def world_size(self) -> int:
        """Number of workers that hold the weights or a part of them."""
        ...

    @property
    def weight_sources(self) -> Collection[type[WeightSource]]:
        """The kinds of source that `update_weights` takes."""
        ...

    async def weight_placement(self) -> WeightPlacement:
        """Return dtype and devices of the weights, for a sender of new ones."""
        ...

    async def update_weights(
        self, source: WeightSource, *, policy_version: int, reuse_kv: bool = False, in_flight: InFlight = InFlight.PAUSE
    ) -> WeightReceipt:
        """Take new weights between two steps; ids sampled from then on carry `policy_version` (I6).

        Nothing is loaded before all weights are there, so a failed transfer leaves the old ones in use. Those that a
        sender brings are the exception (`WireSource`): they are loaded as they come, and after an update that ends
        half-way the engine samples nothing until a whole version comes (`IncompleteWeightsError`).

        KV computed under older weights is recomputed for running requests and dropped from the prefix cache, unless
        `reuse_kv` is set. Values of `TensorSource` are not checked: weights with NaN fail the requests they sample for,
        until the next good weights.

        A source may have a LoRA adapter instead of whole weights (`weights.adapters`), which is added to the weights
        of the start. An engine that computes it apart from them ends running requests with the adapter that they have.

        Raises:
            SamplingError: the engine does not take such a source, `policy_version` does not rise, a name or shape is
                not the model's, or `in_flight` is FINISH while the engine is paused; nothing was loaded.
            WeightsError: the weights did not arrive, or not as they were sent; nothing was loaded, but of a sender's.
            EngineError: the engine is closed, or has failed while it loaded.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """The result of one update."""

    num_bytes: int
    """Size of the tensors, or of the files that hold them."""
    seconds: float
    """Time from the call to the last engine's acknowledgement."""
    missed_by: tuple[str, ...] = ()
    """Engines that could not be reached, and have older weights."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Time of each phase on the slowest server, if the publisher knows it."""


@runtime_checkable
class WeightPublisher(Protocol):
    """Sends versions of the weights to engines."""

    async def publish(
        self, named_parameters: Iterable[tuple[str, torch.Tensor]], *, policy_version: int
    ) -> WeightUpdate:
        """Return once every engine samples with these weights and reports them as `policy_version` (I6).

        A version may be published again, for an engine that was restarted or did not take it. Engines that are gone may
        be left out: `WeightUpdate.missed_by` names them.

        `named_parameters` has each parameter once, under the name that the model's `named_parameters()` gives it; tied
        weights are not repeated. The tensors are the trainer's own: they are only read, and only until this returns.
        Of a `WeightStream` only a part is held at a time.

        Raises:
            SamplingError: the version does not rise, or a name or shape is not that of the engine's model.
            EngineError: an engine is closed or has failed.
        """
        ...


class InProcessPublisher:
    """Publishes to one engine of this process, which has its own copy of the model."""

    def __init__(self, engine: object, *, in_flight: InFlight = InFlight.PAUSE, reuse_kv: bool = False) -> None:
        """`reuse_kv` keeps keys and values of older weights. `InvalidInputError` if the engine takes no new weights."""
        if not isinstance(engine, TakesWeights):
            raise InvalidInputError(f"{type(engine).__name__} takes no new weights")
        self._engine = engine
        self._reuse_kv = reuse_kv
        self._in_flight = in_flight

    async def publish(
        self, named_parameters: Iterable[tuple[str, torch.Tensor]], *, policy_version: int
    ) -> WeightUpdate:
        started = time.perf_counter()
        stream = WeightStream.of(named_parameters)
        await self._engine.update_weights(
            TensorSource(stream), policy_version=policy_version, reuse_kv=self._reuse_kv, in_flight=self._in_flight
        )
        return WeightUpdate(num_bytes=stream.num_bytes, seconds=time.perf_counter() - started)

    async def dtype(self) -> str | None:
        """Return the dtype of the engine's weights."""
        return (await self._engine.weight_placement()).dtype
