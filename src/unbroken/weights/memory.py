"""Weights in memory that other processes of this machine open: a GPU's by CUDA IPC, otherwise the host's.

    this process                                  a process with the model
    WeightRow(specs), put(name, tensor)    one weight behind the other, in the dtypes of the specs
    source(num_workers)          ──────────►      source.read(): the same memory, from which it loads

A handle is numbers, text and bytes, which any RPC carries as they are: nothing is pickled.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from unbroken.errors import WeightsError
from unbroken.weights.sources import NamedTensors, SharedSource, TensorSpec, TiedNames, check_tied

if TYPE_CHECKING:
    import torch

_HOST, _CUDA = "host", "cuda"
_ALIGNMENT = 16
"""Weights begin at multiples of it, in bytes. It is a multiple of each element's size."""
Handle: TypeAlias = list[Any]
"""Values with which one process opens the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySource(SharedSource):
    """A row of weights in another process's memory."""

    specs: tuple[TensorSpec, ...]
    handles: Sequence[Handle]
    """One for each process of the engine, by rank, because torch counts the users of GPU memory."""
    row: WeightRow | None = None
    """The memory, in the process that owns it."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {spec.name: spec.shape for spec in self.specs}

    def read(self, device: torch.device | str, *, rank: int = 0, tied: TiedNames | None = None) -> NamedTensors:
        """Open the row; its tensors are views of it, to be copied from.

        A row on another GPU is copied to this one's, weight by weight as they are read: memory that vLLM can put to
        sleep is open to its own GPU alone, and a copy from another one's ends with `CUDA error: invalid argument`.
        """
        size = _row_bytes(self.specs)
        kind, where, *rest = self.handles[rank]
        try:
            row = _map_file(where, size) if kind == _HOST else _open_on_gpu(where, rest, size)
        except (RuntimeError, OSError) as error:
            raise WeightsError(f"the new weights are in memory that a worker cannot open: {error}") from error
        weights = dict(_split(row, self.specs))
        check_tied(weights, tied)
        if row.is_cuda:
            return ((name, tensor.to(device)) for name, tensor in weights.items())
        return weights.items()

    def to_object(self) -> dict[str, Any]:
        return {"tensors": [spec.to_object() for spec in self.specs], "handles": list(self.handles)}

    @staticmethod
    def from_object(fields: Mapping[str, Any]) -> MemorySource:
        specs = tuple(map(TensorSpec.from_object, fields["tensors"]))
        return MemorySource(specs=specs, handles=fields["handles"])

    def close(self) -> None:
        if self.row is not None:
            self.row.close()


class WeightRow:
    """A row of weights in its own memory. The owner closes it once the workers have loaded.

    Any `device` but a CUDA GPU means the host's memory. Raises `WeightsError` if there is no room.
    """

    def __init__(self, specs: Sequence[TensorSpec], device: torch.device) -> None:
        import torch

        self._specs = tuple(specs)
        self._descriptor: int | None = None
        """Of a file in memory, without a name: nothing is left of it when the processes are gone, however they end."""
        size = _row_bytes(specs)
        try:
            if device.type == _CUDA:
                row = torch.empty(size, dtype=torch.uint8, device=device)
            else:
                self._descriptor = os.memfd_create("unbroken-weights")
                os.ftruncate(self._descriptor, size)
                row = _map_file(self._path, size)
        except (RuntimeError, OSError) as error:
            self.close()
            raise WeightsError(
                f"the new weights need {size / 2**30:.1f} GiB more on {device} while they load, which are not free"
            ) from error
        self._row: torch.Tensor | None = row
        self._places = dict(_split(row, specs))

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a weight to its place."""
        self._places[name].copy_(tensor.detach())

    def source(self, num_workers: int) -> MemorySource:
        """Return the source for an engine of `num_workers` processes, whose `close` closes the row."""
        handles = [self._handle() for _ in range(num_workers)]
        return MemorySource(specs=self._specs, handles=handles, row=self)

    def close(self) -> None:
        """Free the memory; what a worker has open stays until the worker frees it too. Idempotent."""
        self._row, self._places = None, {}
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def _path(self) -> str:
        """Where other processes open the file."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def _handle(self) -> Handle:
        if self._descriptor is not None:
            return [_HOST, self._path]
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        assert self._row is not None
        torch.cuda.synchronize(self._row.device)
        _, arguments = reduce_tensor(self._row)  # type: ignore[no-untyped-call]
        # Of the arguments of `rebuild_cuda_tensor`: memory, its size and offset; then the count and the event.
        return [_CUDA, find_gpu_uuid(self._row.device), *arguments[7:10], *arguments[11:]]


def _map_file(path: str, num_bytes: int) -> torch.Tensor:
    """Map a file in memory, as bytes."""
    import torch

    # All pages at once: one fault for each of them would take longer than the copy.
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    with Path(path).open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes, flags=flags), dtype=torch.uint8)


def _row_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(-(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT for spec in specs)


def _split(row: torch.Tensor, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and values of each weight, as views of the row's bytes."""
    import torch

    start = 0
    for spec in specs:
        values = row[start : start + spec.num_bytes].view(getattr(torch, spec.dtype))
        yield spec.name, values.view(spec.shape)
        start += -(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT


def _open_on_gpu(uuid: str, rest: Sequence[Any], num_bytes: int) -> torch.Tensor:
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    devices = [device for device in range(torch.cuda.device_count()) if find_gpu_uuid(device) == uuid]
    if not devices:
        raise WeightsError(
            f"the new weights are on GPU {uuid}, which a worker does not see: give engine and trainer the same GPUs "
            "(CUDA_VISIBLE_DEVICES), or the engine a transfer_dir"
        )
    shape = [torch.Tensor, (num_bytes,), (1,), 0, torch.storage.TypedStorage, torch.uint8]
    arguments: list[Any] = [*shape, devices[0], *rest[:3], False, *rest[3:]]
    row: torch.Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return row


def find_gpu_uuid(device: Any) -> str:
    """The UUID of a CUDA device, by which processes that number their GPUs differently know it."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
