"""The trainer's side of a broadcast: pack tensors into buckets, and send the buckets to all workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from unbroken.transfer.broadcast import sum_bucket
from unbroken.transfer.group import WeightGroup
from unbroken.transfer.layout import ITEM_BYTES, Layout, Piece

if TYPE_CHECKING:
    import torch


def send(
    group: WeightGroup,
    layout: Layout,
    tensors: Sequence[torch.Tensor],
    *,
    device: torch.device,
    check: Callable[[], None],
) -> list[int]:
    """Send tensors to all workers, and return the sum of each bucket.

    There are two buckets on `device`: one is filled while the other is sent. `tensors` are in the order of the layout,
    on any device; those of another dtype are cast. `check` is called while it waits, and raises to give up. Raises
    `WeightsError` if a worker is gone or too slow.
    """
    import torch

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return _send(group, layout, tensors, device, check)


def _send(
    group: WeightGroup,
    layout: Layout,
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    check: Callable[[], None],
) -> list[int]:
    import torch

    group.connect(device)
    size = min(layout.bucket_bytes, layout.num_bytes)
    buckets = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    works = [None, None]
    sums = []
    source = _Source(layout, tensors)
    for number, ((start, stop), pieces) in enumerate(zip(layout.buckets(), layout.pieces(), strict=True)):
        check()
        turn = number % 2
        if works[turn] is not None:
            group.follow(works[turn])
        bucket = buckets[turn][: stop - start]
        source.fill(bucket, pieces)
        sums.append(sum_bucket(bucket))
        works[turn] = group.broadcast(bucket)
    for work in works:
        if work is not None:
            group.finish(work, device, check=check)
    totals: list[int] = torch.stack(sums).tolist()
    return totals


def compute_sums(layout: Layout, tensors: Sequence[torch.Tensor], *, device: torch.device) -> list[int]:
    """Return what `send` would return, without sending."""
    import torch

    bucket = torch.empty(min(layout.bucket_bytes, layout.num_bytes), dtype=torch.uint8, device=device)
    source = _Source(layout, tensors)
    sums = []
    for (start, stop), pieces in zip(layout.buckets(), layout.pieces(), strict=True):
        source.fill(bucket[: stop - start], pieces)
        sums.append(int(sum_bucket(bucket[: stop - start]).item()))
    return sums


class _Source:
    """Fills buckets. A tensor that is not contiguous is copied once, and not for each of its pieces."""

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        self._layout = layout
        self._tensors = tensors
        self._index = -1
        self._flat: torch.Tensor | None = None

    def fill(self, bucket: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Write the pieces to their places, and zeros between them."""
        import torch

        end = 0
        for piece in pieces:
            if piece.bucket_start > end:
                bucket[end : piece.bucket_start].zero_()
            end = piece.bucket_start + piece.num_bytes
            dtype = self._layout.specs[piece.index].dtype
            width = ITEM_BYTES[dtype]
            first = piece.tensor_start // width
            values = self._values(piece.index)[first : first + piece.num_bytes // width]
            bucket[piece.bucket_start : end].view(getattr(torch, dtype)).copy_(values)
        if end < len(bucket):
            bucket[end:].zero_()

    def _values(self, index: int) -> torch.Tensor:
        if self._flat is None or index != self._index:
            self._index, self._flat = index, self._tensors[index].detach().reshape(-1)
        return self._flat
