"""The weights of an update: their names and shapes, and the sources that an engine takes.

    engine.update_weights(source, policy_version=7)       a small object that holds no copy of the weights
      in each process that holds the model or a part:
        source.read(device, rank=0)  ──►  names and tensors, one after the other, as they are loaded

An engine in this process reads the source itself; one with workers sends it to them with `to_object`.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from unbroken.errors import InvalidInputError, SamplingError, WeightsError
from unbroken.types import is_whole
from unbroken.weights.adapters import is_adapter

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""The dtypes that can be sent, under torch's names, and the bytes of one element."""
_FLOATING = frozenset({"float64", "float32", "bfloat16", "float16"})

NamedTensors: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"
TiedNames: TypeAlias = tuple[str, str]
"""Names of two weights of a source that are one in the model: their values must be equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, dtype and shape of one tensor."""

    name: str
    dtype: str
    """On the wire, under torch's name: `bfloat16`."""
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise InvalidInputError(
                f"weight {self.name!r} must have a dtype among {sorted(ITEM_BYTES)}, got {self.dtype!r}"
            )
        if any(size < 0 for size in self.shape):
            raise InvalidInputError(f"weight {self.name!r} must have a shape of sizes >= 0, got {self.shape}")

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        """Whether its values are floating-point numbers."""
        return self.dtype.startswith(("float", "bfloat"))

    def to_object(self) -> dict[str, Any]:
        """Return the spec as JSON has it."""
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}

    @staticmethod
    def from_object(fields: Mapping[str, Any]) -> TensorSpec:
        """Return the spec that `to_object` wrote."""
        return TensorSpec(name=fields["name"], dtype=fields["dtype"], shape=tuple(fields["shape"]))

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of a tensor."""
        return TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


class WeightStream:
    """The weights of one update: names, dtypes and shapes at once, values one after the other.

    Values may be made while they are read (gathered from other processes, merged with an adapter): whoever reads holds
    no more than it keeps. Such values can be read once; a second iteration continues where the first one ended.
    """

    def __init__(self, specs: Iterable[TensorSpec], tensors: NamedTensors) -> None:
        """`tensors` come in the order of `specs`, on any device and in any dtype: who copies them casts them."""
        self.specs = tuple(specs)
        self._tensors = tensors
        self.is_kept: bool = tensors.is_kept if isinstance(tensors, WeightStream) else isinstance(tensors, Sequence)
        """Whether all values are held anyway, and can be read again and again."""
        self._has_begun = False

    @staticmethod
    def of(named: NamedTensors) -> WeightStream:
        """Return `named` itself if it is a stream; of other iterables all tensors are held."""
        if isinstance(named, WeightStream):
            return named
        weights = list(named)
        return WeightStream((TensorSpec.of(name, tensor) for name, tensor in weights), weights)

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return sum(spec.num_bytes for spec in self.specs)

    def list_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each weight; `SamplingError` if one came twice."""
        if (repeated := find_repeated([spec.name for spec in self.specs])) is not None:
            raise SamplingError(f"weight {repeated!r} came twice")
        return {spec.name: spec.shape for spec in self.specs}

    @property
    def is_whole(self) -> bool:
        """Whether all values can be read from now on."""
        return self.is_kept or not self._has_begun

    def cast(self, dtype: str | None) -> WeightStream:
        """Return the same values with the floating-point ones in another dtype. None leaves them, and an adapter stays
        as it is, because an engine may add it in float32.
        """
        if dtype is None or is_adapter([spec.name for spec in self.specs]):
            return self
        specs = (replace(spec, dtype=dtype) if spec.dtype in _FLOATING else spec for spec in self.specs)
        return WeightStream(specs, self)

    def read_cast(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the values in the dtypes of the specs."""
        import torch

        for spec, (name, tensor) in zip(self.specs, self, strict=True):
            yield name, tensor.detach().to(getattr(torch, spec.dtype))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for named in self._tensors:
            self._has_begun = True
            yield named


def check_stream(stream: WeightStream) -> None:
    """Raise `InvalidInputError` unless there are weights, each once."""
    names = [spec.name for spec in stream.specs]
    if not names:
        raise InvalidInputError("weights is empty: nothing to send (an iterator that was used up before?)")
    if (repeated := find_repeated(names)) is not None:
        raise InvalidInputError(f"weight {repeated!r} came twice")


def find_repeated(names: Sequence[str]) -> str | None:
    """A name that is there several times; None if each is there once."""
    return None if len(set(names)) == len(names) else max(names, key=names.count)


def check_version_rises(new: int, *, current: int) -> None:
    """Raise `SamplingError` unless `new` is a whole number above the policy version in use (I6)."""
    if not is_whole(new, 0):
        raise SamplingError(f"policy_version must be a whole number in [0, 2**31), got {new!r}")
    if new <= current:
        raise SamplingError(f"policy_version must rise above {current}, the version in use; got {new}")


def check_floating(specs: Iterable[TensorSpec]) -> None:
    """Raise `SamplingError` for a weight that has no floating-point numbers: a model would round what it is given."""
    for spec in specs:
        if not spec.is_floating:
            raise SamplingError(f"weight {spec.name!r} must have floating-point numbers, got {spec.dtype}")


def check_finite(name: str, values: torch.Tensor) -> None:
    """Raise `WeightsError` if a number is not finite: an engine would sample with whatever it is given."""
    if not values.is_floating_point() or not values.numel():
        return
    wide = values.float() if values.element_size() == 1 else values  # torch compares no 8-bit numbers
    # The extremes are not finite if any number is not, and take a tenth of the time of `isfinite`.
    if not all(extreme.isfinite() for extreme in wide.aminmax()):
        raise WeightsError(f"weight {name!r} has numbers that are not finite")


def sum_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bytes, taken as 64-bit integers, modulo 2**64."""
    import torch

    flat = values.detach().contiguous().view(-1).view(torch.uint8)
    num_whole = len(flat) // 8 * 8
    words, rest = flat[:num_whole], flat[num_whole:]
    if words.storage_offset() % 8:
        words = words.clone()
    total = words.view(torch.int64).sum()
    if len(rest):
        total = total + torch.nn.functional.pad(rest, (0, 8 - len(rest))).view(torch.int64).sum()
    return total


def make_digest(specs: Sequence[TensorSpec], sums: Sequence[int]) -> str:
    """Return a checksum of names, dtypes, shapes and values: equal for equal weights.

    The values enter as one sum for each weight (`sum_bytes`). That finds weights that differ by mistake; it does not
    protect from an attacker.
    """
    found = [[spec.name, spec.dtype, list(spec.shape), total] for spec, total in zip(specs, sums, strict=True)]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


class WeightSource:
    """Where the weights of one update come from."""

    __slots__ = ()

    @property
    def policy_version(self) -> int | None:
        """Their version, where a sender names it at the end only."""
        return None


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
    def read(self, device: torch.device | str, *, rank: int = 0, tied: TiedNames | None = None) -> NamedTensors:
        """Open the source for the model on `device`; `rank` is the number of this process among those of its engine.

        Returns its weights, which can be read once. The model is not touched.

        Raises:
            WeightsError: it cannot be opened, or the `tied` weights differ.
        """

    @abstractmethod
    def to_object(self) -> dict[str, Any]:
        """Return the source as numbers, text, bytes, lists and dicts, for `from_object` in another process."""

    @staticmethod
    @abstractmethod
    def from_object(fields: Mapping[str, Any]) -> SharedSource:
        """Return the source that `to_object` wrote."""

    def close(self) -> None:  # most hold nothing
        """Free what the source holds, once its update has loaded or failed. Idempotent."""


def check_tied(weights: Mapping[str, torch.Tensor], tied: TiedNames | None) -> None:
    """Raise `WeightsError` if the two tied weights have different values."""
    if tied is None:
        return
    import torch

    head, embedding = tied
    if not torch.equal(weights[head], weights[embedding].to(weights[head].device)):
        raise WeightsError(f"weights {head!r} and {embedding!r} are tied in the model, but their values differ")
