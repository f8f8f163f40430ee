"""Weights to an engine in the same process: no copy but the engine's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from unbroken.engines.base import Engine

if TYPE_CHECKING:
    import torch


class InProcessPublisher:
    """Publishes to one engine of this process. The engine has its own copy of the model, not the trainer's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def publish(self, named_parameters: Iterable[tuple[str, torch.Tensor]], *, policy_version: int) -> None:
        """See `WeightPublisher.publish`. KV of older weights is dropped."""
        await self._engine.load_weights(named_parameters, policy_version=policy_version)
