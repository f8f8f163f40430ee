"""The WeightPublisher protocol: new weights from the trainer to whatever samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@runtime_checkable
class WeightPublisher(Protocol):
    """Hands one version of the weights to the engines."""

    async def publish(self, named_parameters: Iterable[tuple[str, torch.Tensor]], *, policy_version: int) -> None:
        """Return once every engine samples with these weights and reports them as `policy_version` (I6).

        `named_parameters` holds each parameter once, under the name that the model's `named_parameters()` gives it: a
        weight tied to another is not repeated. The tensors are the trainer's own, so they are only read, and not
        after this returns.

        Raises:
            SamplingError: the version does not rise, or a name or shape is not the engine's model's.
            EngineError: an engine is closed or has failed.
        """
        ...
