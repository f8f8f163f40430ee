"""Weights in safetensors files, on a disk that every process with a part of the model can read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.errors import InvalidInputError, WeightsError
from unbroken.transfer.sources import ReceivedWeights, Receiver, SharedSource, TiedNames, check_tied

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class FileSource(SharedSource):
    """The safetensors files of a folder. They must stay as they are until the update is over."""

    folder: Path
    is_temporary: bool = False
    """Whether `close` removes the folder."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `SharedSource`; read from the files' headers."""
        shapes: dict[str, tuple[int, ...]] = {}
        for path in self.paths():
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
        return shapes

    def paths(self) -> list[Path]:
        """Return the files, sorted by name."""
        return sorted(self.folder.glob("*.safetensors"))

    def to_object(self) -> dict[str, Any]:
        """See `SharedSource`."""
        return {"folder": str(self.folder)}

    @staticmethod
    def from_object(fields: Mapping[str, Any]) -> FileSource:
        """See `SharedSource`."""
        return FileSource(Path(fields["folder"]))

    def close(self) -> None:
        """See `SharedSource`."""
        if self.is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)


class FileReceiver(Receiver[FileSource]):
    """Reads the files one tensor at a time, while they are loaded."""

    def receive(self, source: FileSource, *, tied: TiedNames | None = None) -> ReceivedWeights:
        """See `Receiver`."""
        paths = source.paths()
        if not paths:
            raise WeightsError(f"{source.folder} has no *.safetensors files that this process can see")
        if tied is not None:
            check_tied(dict(read_tensors(paths, only=tied)), tied)
        return ReceivedWeights(tensors=read_tensors(paths))


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, file_bytes: int = 2**30
) -> Iterator[Path]:
    """Write safetensors files of about `file_bytes`, and yield each; only one file's tensors are held at a time.

    Raises `InvalidInputError` if a name comes twice, and `OSError` if a file cannot be written.
    """
    import torch

    number, size = 0, 0
    held: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise InvalidInputError(f"weight {name!r} came twice")
        seen.add(name)
        # A copy, because safetensors refuses tensors that share memory.
        held[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        size += tensor.numel() * tensor.element_size()
        if size >= file_bytes:
            yield _write_file(folder / f"{number:05}.safetensors", held)
            number, size, held = number + 1, 0, {}
    if held or number == 0:
        yield _write_file(folder / f"{number:05}.safetensors", held)


def read_tensors(paths: Iterable[Path], *, only: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of safetensors files, one file after the other; `only` those names, if given."""
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # the reader is no dict
                if only is None or name in only:
                    yield name, file.get_tensor(name)


def _write_file(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return path
