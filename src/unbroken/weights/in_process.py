"""Publishes weights to an engine in the same process; the only copy is the engine's own."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from unbroken.engines.base import Engine
from unbroken.engines.checks import require_updatable
from unbroken.transfer.sources import TensorSource, WeightStream
from unbroken.types import InFlight
from unbroken.weights.base import WeightUpdate

if TYPE_CHECKING:
    import torch


class InProcessPublisher:
    """Publishes to one engine of this process, which has its own copy of the model."""

    def __init__(self, engine: Engine, *, in_flight: InFlight = InFlight.PAUSE, reuse_kv: bool = False) -> None:
        """`reuse_kv` keeps keys and values of older weights. `InvalidInputError` if the engine takes no new weights."""
        self._engine = require_updatable(engine)
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
