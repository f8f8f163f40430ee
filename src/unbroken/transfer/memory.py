"""New weights in memory that vLLM's workers on this machine open: the GPU's by CUDA IPC, otherwise the host's.

    this process                                  a worker
    WeightRow(layout), put(name, tensor)   one weight behind the other, in the dtype of the layout
    handle()                     ──────────►      opened()     the same memory: vLLM loads out of it

A handle is numbers, text and bytes, which vLLM's RPC carries as they are: nothing is pickled.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.errors import WeightsError
from unbroken.transfer.layout import Layout

if TYPE_CHECKING:
    import torch

_HOST, _CUDA = "host", "cuda"


class WeightRow:
    """A row of weights in memory of its own; the side of its owner, who closes it once the workers have loaded.

    Args:
        layout: what it holds.
        device: of the row; what is no GPU of CUDA is the host.

    Raises:
        WeightsError: there is no room.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        import torch

        self._file: int | None = None
        try:
            if device.type == _CUDA:
                row = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
            else:
                # A file without a name: nothing is left of it when the processes are gone, however they end.
                self._file = os.memfd_create("unbroken-weights")
                os.ftruncate(self._file, layout.num_bytes)
                row = _mapped(self._path, layout)
        except (RuntimeError, OSError) as error:
            self.close()
            raise WeightsError(
                f"the new weights need {layout.num_bytes / 2**30:.1f} GiB more on {device} while they load, which are "
                "not free"
            ) from error
        self._row: torch.Tensor | None = row
        self._places = dict(_tensors(row, layout))

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a weight to its place."""
        self._places[name].copy_(tensor.detach())

    def handle(self) -> list[Any]:
        """What one worker opens the row with. Each needs its own: torch counts who has GPU memory open."""
        if self._file is not None:
            return [_HOST, self._path]
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        assert self._row is not None
        torch.cuda.synchronize(self._row.device)
        _, arguments = reduce_tensor(self._row)  # type: ignore[no-untyped-call]
        # Of the arguments of `rebuild_cuda_tensor`: memory, its size and offset; then the count and the event.
        return [_CUDA, _uuid(self._row.device), *arguments[7:10], *arguments[11:]]

    def close(self) -> None:
        """Let go of the memory; what a worker has open stays until that lets go of it too. Idempotent."""
        self._row, self._places = None, {}
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"


def opened(handle: Sequence[Any], layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and weights of another process's row; the side of a worker. They are views of it, to be copied from.

    Raises:
        WeightsError: the row is in memory that this process does not see.
    """
    kind, where, *rest = handle
    try:
        row = _mapped(where, layout) if kind == _HOST else _opened_on_gpu(where, rest, layout)
    except (RuntimeError, OSError) as error:
        raise WeightsError(f"the new weights are in memory that a worker cannot open: {error}") from error
    return _tensors(row, layout)


def _mapped(path: str, layout: Layout) -> torch.Tensor:
    import torch

    # All pages at once: one fault for each of them would take longer than the copy.
    how = mmap.MAP_SHARED | mmap.MAP_POPULATE
    with Path(path).open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), layout.num_bytes, flags=how), dtype=torch.uint8)


def _opened_on_gpu(uuid: str, rest: Sequence[Any], layout: Layout) -> torch.Tensor:
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    devices = [device for device in range(torch.cuda.device_count()) if _uuid(device) == uuid]
    if not devices:
        raise WeightsError(
            f"the new weights are on GPU {uuid}, which a worker does not see: give engine and trainer the same GPUs "
            "(CUDA_VISIBLE_DEVICES), or the engine a transfer_dir"
        )
    shape = [torch.Tensor, (layout.num_bytes,), (1,), 0, torch.storage.TypedStorage, torch.uint8]
    arguments: list[Any] = [*shape, devices[0], *rest[:3], False, *rest[3:]]
    row: torch.Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return row


def _uuid(device: Any) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def _tensors(row: torch.Tensor, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight's part of the row."""
    import torch

    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        part = row[offset : offset + spec.num_bytes].view(getattr(torch, spec.dtype))
        yield spec.name, part.view(spec.shape)
