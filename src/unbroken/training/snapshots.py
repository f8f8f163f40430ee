"""Copies of the trainer's weights, which go to engines while the next steps are made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from unbroken.training.trainer import Trainer

if TYPE_CHECKING:
    import torch

Snapshot: TypeAlias = "Sequence[tuple[str, torch.Tensor]]"


class Snapshots:
    """One copy of a version for all that send it: the loop to its engines, an evaluation to its own.

    Every process calls `take` together: with sharded models they gather the weights together.
    """

    def __init__(self, trainer: Trainer, *, is_sender: bool) -> None:
        """Only a process that sends weights, `is_sender`, copies them."""
        self._trainer = trainer
        self._is_sender = is_sender
        self._version: int | None = None
        """Of the copy that is kept; the same in all processes."""
        self._newest: Snapshot | None = None

    async def take(self) -> Snapshot | None:
        """The weights of the trainer's version; None in a process that sends none. Until `release` the same copy."""
        version = self._trainer.policy_version
        if self._version != version:
            self._newest = await self._copy()
            self._version = version
        return self._newest

    def release(self) -> None:
        """Keep the copy no longer. Those who took it still have it."""
        self._version, self._newest = None, None

    async def _copy(self) -> Snapshot | None:
        weights = self._trainer.named_weights()
        copies: Snapshot | None = None
        failure: Exception | None = None
        if self._is_sender:
            try:
                copies = await asyncio.to_thread(_copy, weights)
            except Exception as error:
                failure = error
        await asyncio.to_thread(self._trainer.finish_together, weights, failure)
        return copies


def _copy(weights: Any) -> Snapshot:
    return [(name, tensor.detach().clone()) for name, tensor in weights]
