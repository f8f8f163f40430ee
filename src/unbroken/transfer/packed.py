"""vLLM's packed broadcast, as its trainer side sends it (vLLM 0.22 to 0.33, with which TRL since 1.11 sends weights).

The trainer is rank 0 of a group; all workers of all servers have the ranks after it. The weights come in the order of
their announcement, in chunks that both sides derive from the sizes: a chunk ends with the first weight that makes it
larger than `buffer_bytes`, without padding. With `buffer_bytes` 8 and weights of 4, 6, 20 and 2 bytes:

    chunk 0: 4 + 6 bytes      chunk 1: 20 bytes      chunk 2: 2 bytes

Not packed, each weight is a chunk of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unbroken.errors import InvalidInputError
from unbroken.transfer.announcement import Transport
from unbroken.transfer.layout import ITEM_BYTES, TensorSpec

if TYPE_CHECKING:
    import torch

BUFFER_BYTES = 2**30
"""vLLM's default, which neither it nor TRL sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where a trainer and the workers form a group."""

    host: str
    port: int
    """The trainer's store listens there."""
    first_rank: int
    """Rank of this server's first worker."""
    world_size: int
    """The trainer, and all workers of all servers."""
    transport: Transport
    join_timeout_s: float = 60.0
    """Longest wait for the others to join. The engine samples nothing meanwhile."""
    timeout_s: float = 300.0
    """Longest wait for a chunk."""

    def __post_init__(self) -> None:
        for name in ("join_timeout_s", "timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidInputError(f"{name} must be > 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPacking:
    """How weights are put into chunks; the trainer and all workers must use the same."""

    packed: bool = False
    buffer_bytes: int = BUFFER_BYTES

    def split(self, specs: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
        """Yield the weights of each chunk."""
        chunk: list[TensorSpec] = []
        size = 0
        for spec in specs:
            chunk.append(spec)
            size += spec.num_bytes
            if not self.packed or size > self.buffer_bytes:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk


def unpack(chunk: torch.Tensor, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and values of each weight of a chunk of bytes: views of it, or copies where it lies between items."""
    import torch

    start = 0
    for spec in specs:
        values = chunk[start : start + spec.num_bytes]
        if start % ITEM_BYTES[spec.dtype]:
            values = values.clone()
        yield spec.name, values.view(getattr(torch, spec.dtype)).view(spec.shape)
        start += spec.num_bytes
