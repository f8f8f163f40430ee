"""The WeightPublisher protocol: new weights from the trainer to whatever samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """What one update took."""

    num_bytes: int
    """Of the tensors, or of the files that held them."""
    seconds: float
    """From the call to the last engine's acknowledgement."""
    missed_by: tuple[str, ...] = ()
    """Engines of several that could not be told, and have older weights."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """What took how long, where the publisher knows: those of the slowest server."""


@runtime_checkable
class WeightPublisher(Protocol):
    """Hands one version of the weights to the engines."""

    async def publish(
        self, named_parameters: Iterable[tuple[str, torch.Tensor]], *, policy_version: int
    ) -> WeightUpdate:
        """Return once every engine samples with these weights and reports them as `policy_version` (I6).

        A version may be published again, for an engine that was started again or did not take it. Of several engines,
        those that are gone may be left out, and are told of in the update.

        `named_parameters` holds each parameter once, under the name that the model's `named_parameters()` gives it: a
        weight tied to another is not repeated. The tensors are the trainer's own, so they are only read, and not
        after this returns.

        Raises:
            SamplingError: the version does not rise, or a name or shape is not the engine's model's.
            EngineError: an engine is closed or has failed.
        """
        ...
