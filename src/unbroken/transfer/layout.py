"""Where each tensor lies in the row of bytes that holds all weights, and how the row is cut into buckets.

Each tensor begins at a multiple of 16 bytes, and the row is sent in buckets of equal size: a large tensor spans several
buckets, and hundreds of small ones share one. With buckets of 64 bytes:

    norm  float32 [3]   bytes  0 to  12      bucket 0: norm, 4 zero bytes, the first 12 float32 of embed
    embed float32 [5,4] bytes 16 to  96      bucket 1: the other 8
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unbroken.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16
"""Tensors and buckets begin at multiples of it, in bytes. It is a multiple of each element's size, so none is cut."""
ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""The dtypes that can be sent, under torch's names, and the bytes of one element."""


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

    def to_object(self) -> dict[str, Any]:
        """Return the spec as JSON has it."""
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}

    @staticmethod
    def from_object(fields: Mapping[str, Any]) -> TensorSpec:
        """Return the spec that `to_object` wrote."""
        return TensorSpec(name=fields["name"], dtype=fields["dtype"], shape=tuple(fields["shape"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of a tensor that lies in one bucket; offsets and sizes in bytes."""

    index: int
    """The tensor's number in the layout."""
    tensor_start: int
    bucket_start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The row of all tensors, and its buckets."""

    specs: tuple[TensorSpec, ...]
    bucket_bytes: int
    """Size of each bucket; the last one may be shorter."""
    offsets: tuple[int, ...] = field(init=False)
    """First byte of each tensor in the row."""
    num_bytes: int = field(init=False)
    """Size of the row, a multiple of 16."""

    def __post_init__(self) -> None:
        if not self.specs:
            raise InvalidInputError("weights is empty: nothing to send (an iterator that was used up before?)")
        check_bucket_bytes(self.bucket_bytes)
        names = [spec.name for spec in self.specs]
        if len(set(names)) < len(names):
            raise InvalidInputError(f"weight {max(names, key=names.count)!r} came twice")
        offsets, end = [], 0
        for spec in self.specs:
            offsets.append(end)
            end += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "num_bytes", end)

    def buckets(self) -> list[tuple[int, int]]:
        """Return start and stop of each bucket, in bytes of the row."""
        starts = range(0, self.num_bytes, self.bucket_bytes)
        return [(start, min(start + self.bucket_bytes, self.num_bytes)) for start in starts]

    def pieces(self) -> list[list[Piece]]:
        """Return the pieces of each bucket, in order."""
        found: list[list[Piece]] = [[] for _ in self.buckets()]
        for index, (spec, offset) in enumerate(zip(self.specs, self.offsets, strict=True)):
            done = 0
            while done < spec.num_bytes:
                bucket, bucket_start = divmod(offset + done, self.bucket_bytes)
                size = min(spec.num_bytes - done, self.bucket_bytes - bucket_start)
                found[bucket].append(Piece(index=index, tensor_start=done, bucket_start=bucket_start, num_bytes=size))
                done += size
        return found

    def digest(self, bucket_sums: Sequence[int]) -> str:
        """Return a checksum of names, shapes and values: equal for equal weights in equal buckets.

        The values enter as one sum for each bucket. That finds weights that differ by mistake; it does not protect from
        an attacker.
        """
        specs = [[spec.name, spec.dtype, list(spec.shape)] for spec in self.specs]
        return hashlib.sha256(json.dumps([self.bucket_bytes, specs, list(bucket_sums)]).encode()).hexdigest()

    def split(self, row: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and values of each tensor, as views of the row's bytes."""
        import torch

        for spec, offset in zip(self.specs, self.offsets, strict=True):
            values = row[offset : offset + spec.num_bytes].view(getattr(torch, spec.dtype))
            yield spec.name, values.view(spec.shape)


def check_bucket_bytes(bucket_bytes: int) -> None:
    """Raise `InvalidInputError` unless buckets of this size cut no element."""
    if bucket_bytes < ALIGNMENT or bucket_bytes % ALIGNMENT:
        raise InvalidInputError(f"bucket_bytes must be a multiple of {ALIGNMENT}, got {bucket_bytes}")
