"""The WeightPublisher protocol: brings new weights from the trainer to the engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


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
class CastingPublisher(Protocol):
    """A publisher whose engines have one dtype, so that a copy of the weights is made in it."""

    async def dtype(self) -> str | None:
        """Return the dtype of floating-point weights in the engines, under torch's name; None if there are several."""
        ...


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
