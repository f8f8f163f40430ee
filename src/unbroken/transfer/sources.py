"""The sources of new weights, and the receivers that read them where the model is.

A transport is one file with these two classes, and a line in `transports.RECEIVERS`:

    engine.update_weights(source, policy_version=7)       a small object that holds no copy of the weights
      in each process that holds the model or a part:
        receiver.receive(source)  ──►  ReceivedWeights    all there and verified; the model is not touched yet
        load received.tensors

An engine in this process hands the source to the receiver; one with workers sends it to them with `to_object`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from unbroken.errors import WeightsError

if TYPE_CHECKING:
    import torch

NamedTensors: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"
TiedNames: TypeAlias = tuple[str, str]
"""Names of two weights of a source that are one in the model: their values must be equal."""


class WeightSource:
    """Where the weights of one update come from."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TensorSource(WeightSource):
    """Tensors of this process, each once under its name. They are only read, and read once."""

    tensors: NamedTensors


class SharedSource(WeightSource, ABC):
    """A source that other processes can read too."""

    __slots__ = ()

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return names and shapes of all weights, not the values; `WeightsError` if the source cannot be read."""

    @abstractmethod
    def to_object(self) -> dict[str, Any]:
        """Return the source as numbers, text, bytes, lists and dicts, for `from_object` in another process."""

    @staticmethod
    @abstractmethod
    def from_object(fields: Mapping[str, Any]) -> SharedSource:
        """Return the source that `to_object` wrote."""

    def close(self) -> None:  # most hold nothing
        """Free what the source holds, once its update has loaded or failed. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedWeights:
    """Weights that are in this process and verified."""

    tensors: NamedTensors
    """Under the source's names; can be read once."""
    digest: str | None = None
    """A checksum of names, shapes and values, where the transport computes one."""


S = TypeVar("S", bound=WeightSource)


class Receiver(ABC, Generic[S]):
    """Reads sources of one kind in a process that holds the model; one object serves all updates."""

    def __init__(self, device: torch.device | str, *, rank: int = 0) -> None:
        """Receive for the model on `device`; `rank` is the number of this process among those of its engine."""
        self._device = device
        self._rank = rank

    @abstractmethod
    def receive(self, source: S, *, tied: TiedNames | None = None) -> ReceivedWeights:
        """Return the source's weights once all are there and verified. Blocks; the model is not touched.

        Raises:
            WeightsError: they did not come, are not what was sent, or the `tied` ones differ. Nothing is kept.
        """


class TensorReceiver(Receiver[TensorSource]):
    """Takes tensors of this process as they are."""

    def receive(self, source: TensorSource, *, tied: TiedNames | None = None) -> ReceivedWeights:
        return ReceivedWeights(tensors=list(source.tensors))


def check_tied(weights: Mapping[str, torch.Tensor], tied: TiedNames | None) -> None:
    """Raise `WeightsError` if the two tied weights have different values."""
    if tied is None:
        return
    import torch

    head, embedding = tied
    if not torch.equal(weights[head], weights[embedding].to(weights[head].device)):
        raise WeightsError(f"weights {head!r} and {embedding!r} are tied in the model, but their values differ")
