"""Weights in safetensors files, on a disk that every process with a part of the model can read."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.errors import InvalidInputError, WeightsError
from unbroken.transfer.sources import ReceivedWeights, Receiver, SharedSource, TiedNames, check_tied
from unbroken.untrusted import check_regular

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
        files = map(_open, self.paths())
        return {name: tuple(file.get_slice(name).get_shape()) for file in files for name in file.keys()}  # noqa: SIM118

    def paths(self) -> list[Path]:
        """Return the files, sorted by name."""
        return sorted(self.folder.glob("*.safetensors"))

    def to_object(self) -> dict[str, Any]:
        return {"folder": str(self.folder)}

    @staticmethod
    def from_object(fields: Mapping[str, Any]) -> FileSource:
        return FileSource(Path(fields["folder"]))

    def close(self) -> None:
        if self.is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)


class FileReceiver(Receiver[FileSource]):
    """Opens all files, and reads them one tensor at a time while they are loaded.

    A file that is opened is whole: its header fits its length. It stays readable if it is removed or replaced.
    """

    def receive(self, source: FileSource, *, tied: TiedNames | None = None) -> ReceivedWeights:
        paths = source.paths()
        if not paths:
            raise WeightsError(f"{source.folder} has no *.safetensors files that this process can see")
        files = [_open(path) for path in paths]
        if tied is not None:
            check_tied(dict(_read(files, only=tied)), tied)
        return ReceivedWeights(tensors=_read(files))


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


def read_tensors(paths: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of safetensors files, one file after the other; `WeightsError` for a broken one."""
    return _read(map(_open, paths))


def _read(files: Iterable[Any], *, only: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of open files; `only` those names, if given."""
    for file in files:
        for name in file.keys():  # noqa: SIM118  # the reader is not a dict
            if only is None or name in only:
                yield name, file.get_tensor(name)


def _open(path: Path) -> Any:
    """Open a safetensors file, which is closed with its last reference; `WeightsError` if it is not whole."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"weight file {path} cannot be read: {error}") from error


def _write_file(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return path
