"""One version of the weights as files: renamed when whole and on the disk, verified before any is used.

weights/version-00000007-91fe.../
00000.safetensors  00001.safetensors ...
manifest.json      the version, and name, bytes and SHA-256 of each file

The folder's name has the version and the beginning of its digest, so that it never has other contents later.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.errors import InvalidInputError, UnbrokenError, WeightsError
from unbroken.untrusted import check_regular
from unbroken.weights.folders import complete_folder, flush_to_disk, temporary_name
from unbroken.weights.sources import (
    NamedTensors,
    SharedSource,
    TensorSpec,
    TiedNames,
    check_finite,
    check_floating,
    check_tied,
)

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 2**24
"""Bytes: some hundred thousand files of 1 GB."""
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One safetensors file."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """A folder with one version of the weights."""

    folder: Path
    policy_version: int
    files: tuple[WeightFile, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """A checksum of the contents: equal for equal files."""
        return hashlib.sha256("".join(file.sha256 for file in self.files).encode()).hexdigest()

    def verify(self) -> None:
        """Compare files and manifest; `WeightsError` names one that is missing, cut short, changed or extra."""
        for path in self.folder.glob("*.safetensors"):
            if path.name not in {file.name for file in self.files}:
                raise WeightsError(f"weight file {path} is not in the {MANIFEST} of its folder: remove it")
        for file in self.files:
            _check_file(self.folder / file.name, file)
        in_threads(lambda file: _check_contents(self.folder / file.name, file), self.files)

    def check_values(self) -> None:
        """Check that every tensor has floating-point numbers, all of them finite; reads the files once.

        Of files that a trainer wrote this is so. A server asks before it loads what anybody may have written, as its
        engine would sample with whatever it is given.

        Raises:
            WeightsError: a tensor has another dtype, or a number that is not finite.
        """
        for name, tensor in self.tensors():
            try:
                check_floating([TensorSpec.of(name, tensor)])
                check_finite(name, tensor)
            except UnbrokenError as error:
                raise WeightsError(f"{self.folder}: {error}") from error

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read names and tensors, one file after the other."""
        return read_tensors(self.folder / file.name for file in self.files)


def write_weights(
    parent: Path, weights: Iterable[tuple[str, torch.Tensor]], *, policy_version: int, file_bytes: int = 2**30
) -> WeightFiles:
    """Write one whole version into its own folder in `parent`, which is there whole or not at all.

    Tensors are copied to the CPU one file at a time. If the version cannot be written (a full disk, say), nothing is
    left of it, and `WeightsError` is raised. A process that is killed leaves `.version-NUMBER-HEX`, which
    `folders.remove_unfinished` removes.
    """
    temporary = temporary_name(parent / f"version-{policy_version:08}")
    try:
        temporary.mkdir(parents=True)
        files = tuple(map(describe_file, write_tensors(temporary, weights, file_bytes=file_bytes)))
        (temporary / MANIFEST).write_bytes(write_manifest(policy_version, files))
        flush_to_disk(temporary / MANIFEST)
        digest = WeightFiles(folder=temporary, policy_version=policy_version, files=files).digest
        folder = parent / f"version-{policy_version:08}-{digest[:12]}"
        complete_folder(temporary, folder)
    except OSError as error:
        raise WeightsError(
            f"version {policy_version} of the weights cannot be written to {parent}: {error}. The engines keep the "
            "version that they have; make room, or name another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return WeightFiles(folder=folder, policy_version=policy_version, files=files)


def write_manifest(policy_version: int, files: Iterable[WeightFile], base: str | None = None) -> bytes:
    """Write a manifest as JSON; `base` is the version that deltas are against, None if the files are whole."""
    described = [asdict(file) for file in files]
    manifest = {"format": FORMAT, "policy_version": policy_version, "base": base, "files": described}
    return json.dumps(manifest, indent=1).encode()


def describe_file(path: Path) -> WeightFile:
    """Flush a file to the disk and describe it."""
    flush_to_disk(path)
    return WeightFile(name=path.name, num_bytes=path.stat().st_size, sha256=_sha256(path))


def parse_files(entries: Iterable[dict[str, Any]]) -> tuple[WeightFile, ...]:
    """Read the files of a manifest; raises `InvalidInputError`, or as for wrong types."""
    return tuple(map(_weight_file, entries))


def _weight_file(entry: dict[str, Any]) -> WeightFile:
    name = str(entry["name"])
    if Path(name).name != name or "\0" in name:
        raise InvalidInputError(f"a file must stand in the folder itself, got {name!r}")
    return WeightFile(name=name, num_bytes=int(entry["num_bytes"]), sha256=str(entry["sha256"]))


def _check_file(path: Path, file: WeightFile) -> None:
    """Refuse what shows before a file is read: a wrong size, or what is no regular file."""
    if path.exists() and not path.is_file():  # hashing a pipe or a device would never end
        raise WeightsError(f"weight file {path} is no regular file")
    if path.exists() and (size := path.stat().st_size) != file.num_bytes:
        raise WeightsError(f"weight file {path} must have {file.num_bytes} bytes, got {size}: write the version again")


def _check_contents(path: Path, file: WeightFile) -> None:
    try:
        found = _sha256(path)
    except OSError as error:
        raise WeightsError(f"weight file {path} cannot be read: {error.strerror}") from error
    if found != file.sha256:
        raise WeightsError(
            f"weight file {path} must have SHA-256 {file.sha256[:12]}..., got {found[:12]}...: write the version again"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def in_threads(work: Callable[[Any], object], items: Iterable[Any]) -> None:
    """Do the work for each item, in as many threads as there are processors, at most 8; raises the first error."""
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        for _ in threads.map(work, items):
            pass


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

    def read(self, device: torch.device | str, *, rank: int = 0, tied: TiedNames | None = None) -> NamedTensors:
        """Open all files; each tensor is read while it is loaded.

        A file that is opened is whole: its header fits its length. It stays readable if it is removed or replaced.
        """
        paths = self.paths()
        if not paths:
            raise WeightsError(f"{self.folder} has no *.safetensors files that this process can see")
        files = [_open(path) for path in paths]
        if tied is not None:
            check_tied(dict(_read(files, only=tied)), tied)
        return _read(files)

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
