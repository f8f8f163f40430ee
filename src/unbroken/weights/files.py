"""One version of the weights as files: renamed when whole and on the disk, verified before any is used.

weights/version-00000007/
00000.safetensors  00001.safetensors ...
manifest.json      the version, and name, bytes and SHA-256 of each file
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.errors import InvalidInputError, UnbrokenError, WeightsError
from unbroken.untrusted import check_regular, read_json_file
from unbroken.weights.folders import atomic_folder, flush_to_disk
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

_MANIFEST = "manifest.json"
_FORMAT = 1
MAX_MANIFEST_BYTES = 2**24
"""Bytes: some hundred thousand files of 1 GB."""
_VERSION_NAME = re.compile(r"version-(\d{8,})")
_REMEMBERED_S = 600.0
_MIN_REMEMBERED_BYTES = 2**23
"""Smaller files are read in milliseconds."""
_TICK_NS = 50_000_000
"""Times of files are as fine as the kernel's clock ticks, a few ms."""


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
                raise WeightsError(f"weight file {path} is not in the {_MANIFEST} of its folder: remove it")
        for file in self.files:
            path = self.folder / file.name
            if path.exists() and not path.is_file():  # hashing a pipe or a device would never end
                raise WeightsError(f"weight file {path} is no regular file")
            if path.exists() and (size := path.stat().st_size) != file.num_bytes:  # before all of it is read
                raise WeightsError(
                    f"weight file {path} must have {file.num_bytes} bytes, got {size}: write the version again"
                )
        sums: dict[str, str] = {}
        for wait in (False, True):  # other servers of this machine may be at some of them
            for file in self.files:
                path = self.folder / file.name
                try:
                    if file.name not in sums and (known := _sha256_once(path, wait=wait)) is not None:
                        sums[file.name] = known
                except OSError as error:
                    raise WeightsError(f"weight file {path} cannot be read: {error.strerror}") from error
        for file in self.files:
            path = self.folder / file.name
            found = WeightFile(name=file.name, num_bytes=path.stat().st_size, sha256=sums[file.name])
            if found != file:
                raise WeightsError(
                    f"weight file {path} must have {file.num_bytes} bytes with SHA-256 {file.sha256[:12]}..., got "
                    f"{found.num_bytes} with {found.sha256[:12]}...: write the version again"
                )

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
    """Write one version into its own folder in `parent`, which is there whole or not at all (`atomic_folder`).

    Tensors are copied to the CPU one file at a time. An existing folder of the version is replaced. If the version
    cannot be written (a full disk, say), nothing is left of it, and `WeightsError` is raised.
    """
    folder = parent / f"version-{policy_version:08}"
    try:
        with atomic_folder(folder) as temporary:
            files = tuple(map(describe_file, write_tensors(temporary, weights, file_bytes=file_bytes)))
            manifest = {"format": _FORMAT, "policy_version": policy_version, "files": [asdict(file) for file in files]}
            (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
            flush_to_disk(temporary / _MANIFEST)
    except OSError as error:
        raise WeightsError(
            f"version {policy_version} of the weights cannot be written to {parent}: {error}. The engines keep the "
            "version that they have; make room, or name another folder"
        ) from error
    return WeightFiles(folder=folder, policy_version=policy_version, files=files)


def read_manifest(folder: Path) -> WeightFiles:
    """Read a folder's manifest; `verify` checks the files. `WeightsError` if the folder holds no whole version."""
    try:
        manifest = read_json_file(folder / _MANIFEST, max_bytes=MAX_MANIFEST_BYTES)
        if manifest["format"] != _FORMAT:
            raise InvalidInputError(f"format must be {_FORMAT}, got {manifest['format']!r}")
        files = parse_files(manifest["files"])
        return WeightFiles(folder=folder, policy_version=parse_version(manifest["policy_version"]), files=files)
    except (OSError, ValueError, OverflowError, KeyError, TypeError) as error:  # int(1e999) overflows
        raise WeightsError(
            f"{folder} must hold a version of the weights with its {_MANIFEST}: {type(error).__name__}: {error}"
        ) from error


def describe_file(path: Path) -> WeightFile:
    """Flush a file to the disk and describe it."""
    flush_to_disk(path)
    return WeightFile(name=path.name, num_bytes=path.stat().st_size, sha256=_sha256(path))


def find_versions(parent: Path) -> dict[int, Path]:
    """Find the whole versions in a folder, lowest first."""
    found = ((_VERSION_NAME.fullmatch(path.name), path) for path in (parent.iterdir() if parent.is_dir() else ()))
    return dict(sorted((int(match[1]), path) for match, path in found if match is not None))


def list_newest_first(parent: Path) -> list[Path]:
    """The whole versions in a folder, the one that was written last first.

    Numbers alone do not say which is newest: a run that begins anew finds higher ones of the run before. Raises
    `FileNotFoundError` if one is removed meanwhile.
    """
    return sorted(find_versions(parent).values(), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def parse_version(value: Any) -> int:
    """Read the policy version of a manifest; raises `InvalidInputError` unless it is an integer that a row can have."""
    if type(value) is not int or not 0 <= value < 2**31:
        raise InvalidInputError(f"policy_version must be an integer in [0, 2**31), got {value!r}")
    return value


def parse_files(entries: Iterable[dict[str, Any]]) -> tuple[WeightFile, ...]:
    """Read the files of a manifest; raises `InvalidInputError`, or as for wrong types."""
    return tuple(map(_weight_file, entries))


def _weight_file(entry: dict[str, Any]) -> WeightFile:
    name = str(entry["name"])
    if Path(name).name != name or "\0" in name:
        raise InvalidInputError(f"a file must stand in the folder itself, got {name!r}")
    return WeightFile(name=name, num_bytes=int(entry["num_bytes"]), sha256=str(entry["sha256"]))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_once(path: Path, *, wait: bool) -> str | None:
    """The file's SHA-256, which one process of this user and machine computes for all others in the next minutes.

    They leave it in a file named by all that `stat` says of the weight file, where any change of it shows: one that is
    so new that another change might have the same time is not remembered. None if another process is computing it, and
    it is not to be waited for.
    """
    status = path.stat()
    if status.st_size < _MIN_REMEMBERED_BYTES:
        return _sha256(path)
    identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    is_settled = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _TICK_NS
    try:
        import fcntl

        folder = Path(tempfile.gettempdir(), f"unbroken-sums-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        of_folder = folder.lstat()
        if not stat.S_ISDIR(of_folder.st_mode) or of_folder.st_uid != os.getuid() or of_folder.st_mode & 0o077:
            return _sha256(path)
        note = (folder / "-".join(map(str, identity))).open("a+")
    except (OSError, ImportError, AttributeError):  # ImportError, AttributeError: Windows
        return _sha256(path)
    with note:
        try:
            fcntl.flock(note, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return None
        except OSError:  # of a file system without locks
            return _sha256(path)
        note.seek(0)
        found = note.read()
        if len(found) == 64 and time.time() - os.fstat(note.fileno()).st_mtime < _REMEMBERED_S:
            return found
        found = _sha256(path)
        with suppress(OSError):  # no room
            note.truncate(0)
            if is_settled:
                os.write(note.fileno(), found.encode())
        fcntl.flock(note, fcntl.LOCK_UN)  # a fork may have the descriptor too
    with suppress(OSError):
        for other in folder.iterdir():
            if time.time() - other.stat().st_mtime > 2 * _REMEMBERED_S:
                other.unlink()
    return found


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
