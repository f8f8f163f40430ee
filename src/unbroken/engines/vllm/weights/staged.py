"""Weights that workers receive over several calls and keep until all are loaded: what such transports share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unbroken.engines.vllm.weights.checkpoint import WeightShapes
from unbroken.transfer.layout import TensorSpec
from unbroken.transfer.sources import ReceivedWeights, Receiver, SharedSource, TiedNames, check_tied

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSource(SharedSource):
    """Weights that the workers have received already."""

    specs: tuple[TensorSpec, ...]
    forget: Callable[[], None] = lambda: None
    """Called when the update is over: the workers have the weights no longer."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {spec.name: spec.shape for spec in self.specs}

    def to_object(self) -> dict[str, Any]:
        return {"tensors": [spec.to_object() for spec in self.specs]}

    @staticmethod
    def from_object(fields: Mapping[str, Any]) -> StagedSource:
        return StagedSource(specs=tuple(map(TensorSpec.from_object, fields["tensors"])))

    def close(self) -> None:
        self.forget()


class StagedReceiver(Receiver[StagedSource]):
    """A worker's side."""

    def __init__(self, device: torch.device, *, rank: int = 0) -> None:
        super().__init__(device, rank=rank)
        self._device: torch.device = device
        self._weights: dict[str, torch.Tensor] = {}
        """What came and is not loaded yet, by name."""

    def receive(self, source: StagedSource, *, tied: TiedNames | None = None) -> ReceivedWeights:
        """See `Receiver`: the weights are here already."""
        kept, self._weights = self._weights, {}
        weights = {spec.name: kept[spec.name] for spec in source.specs}
        check_tied(weights, tied)
        return ReceivedWeights(tensors=weights.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The workers of an engine."""

    rpc: Callable[..., Awaitable[list[Any]]]
    """Calls a method of `WorkerExtension` in each; returns their answers."""
    shapes: Callable[[], Awaitable[WeightShapes]]
    check_awake: Callable[[], None]
    """Raises `EngineError` unless the engine is awake."""
    number: int


class StagedTransfer:
    """The engine's side, which calls the receivers of all workers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._specs: dict[str, TensorSpec] = {}
        """What the workers keep, by name."""
        self._error: str | None = None
        """Why the weights will not come."""
