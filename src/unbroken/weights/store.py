"""Versions of the weights in a store: a folder that trainer and servers see, or an object store.

s3://bucket/run/                 or a folder, OUTPUT/weights
newest.json                      the names of the newest version and of the newest whole one
version-00000006-5a0c.../        manifest.json, 00000.safetensors ...
version-00000007-91fe.../        manifest.json, which names its base, 00000.safetensors.delta ...

A trainer that writes into a folder writes whole versions there, which servers read where they lie. One that has a
folder elsewhere makes each version there and brings the store what changed; servers make the files of it.

A manifest has the SHA-256 of the *whole* files, also where only deltas are: what was made from a base and deltas is
what was written, or it is not used. No name has other contents later, but for `newest.json`, which is written last.

A delta is the words of 16 bits that differ from the base. Of bfloat16 weights that is an element, and an update
changes few of them, by little: at a learning rate of 1e-6 one in fifty, at 1e-5 one in seven. With steps of
[words] and blocks of 8 Mi words, each compressed by zlib:

    base  3f80 3f81 3f82 3f83        changed: words 1 and 3         steps 1 2       (255: go on, nothing changed)
    new   3f80 3f80 3f82 3f84        xor: 0001 0007                 low bytes 01 07, high bytes 00 00
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec.core
import numpy as np
import numpy.typing as npt

from unbroken.errors import InvalidInputError, UnbrokenError, WeightsError
from unbroken.untrusted import read_json
from unbroken.weights.files import (
    FORMAT,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    WeightFile,
    WeightFiles,
    in_threads,
    parse_files,
    write_manifest,
    write_weights,
)
from unbroken.weights.folders import atomic_folder, flush_to_disk, remove_unfinished, temporary_name

if TYPE_CHECKING:
    import torch

_NEWEST = "newest.json"
_NAME = re.compile(r"version-\d{8,}-[0-9a-f]{12}")
_LOCAL = ("file", "local")
_BLOCK_BYTES = 2**24
_MAX_SHARE = 0.5
"""A delta that has a larger share of the whole files' bytes is not worth its chain."""
_CACHE, _NEW_S = "unbroken-versions-", 60.0
Words = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """The manifest of a version."""

    name: str
    policy_version: int
    files: tuple[WeightFile, ...]
    """The whole files."""
    base: str | None
    """The version that its deltas are against; None if it has whole files."""

    @property
    def digest(self) -> str:
        """That of `WeightFiles`."""
        return self.in_folder(Path()).digest

    @property
    def num_bytes(self) -> int:
        """Size of the whole files."""
        return self.in_folder(Path()).num_bytes

    def in_folder(self, folder: Path) -> WeightFiles:
        """The whole files, where a folder has them."""
        return WeightFiles(folder=folder, policy_version=self.policy_version, files=self.files)


class VersionStore:
    """One trainer's versions. Each process that writes or reads has its own object; its methods block."""

    def __init__(self, place: str | Path, *, made_in: Path | None = None, full_every: int = 10) -> None:
        """`place` is a folder, or one of fsspec's URLs.

        A writer makes its versions in the folder `made_in`, its own, and writes to `place` what changed since the one
        before. Without `made_in` the place must be a folder, in which each version is made, and stays, whole. Of
        deltas every `full_every`-th version is written whole: a server that comes reads it, and the deltas since.

        Raises:
            InvalidInputError: the URL cannot be used, or needs a package that is not installed.
        """
        if full_every < 1:
            raise InvalidInputError(f"full_every must be at least 1, got {full_every}")
        self.url = str(place).rstrip("/") if _is_url(place) else str(Path(place).resolve())
        self._full_every = full_every
        is_local = not _is_url(place) or self.url.partition("://")[0].lower() in _LOCAL
        options = {"auto_mkdir": True} if is_local else {}
        self._files: Any
        self._root: str
        try:
            if _is_url(place):
                self._files, self._root = fsspec.core.url_to_fs(self.url, **options)
            else:  # a folder's name may have "::", which in a URL is a chain
                self._files, self._root = fsspec.filesystem("file", **options), self.url
        except (ImportError, ValueError) as error:
            raise InvalidInputError(f"the store {self.url} cannot be used: {error}") from error
        self._folder = Path(self._root) if is_local else None
        self._made_in = self._folder if made_in is None else made_in.resolve()
        self._written: list[StoredVersion] = []
        """Versions of this object's, the newest last: those since the whole one that the oldest kept one needs."""
        self._local: tuple[str, WeightFiles] | None = None
        """The version that was made here last by a reader: its name, and its files."""
        self._cache: tempfile.TemporaryDirectory[str] | None = None
        self._lock = -1
        """Of the cache, which the system frees when this process ends, however it ends."""

    @property
    def has_deltas(self) -> bool:
        """Whether this writer writes what changed, and makes its versions elsewhere."""
        return self._made_in != self._folder

    def close(self) -> None:
        """Remove what was made here."""
        self._local = None
        if self._cache is not None:
            self._cache.cleanup()
            self._cache = None
            with suppress(OSError):
                os.close(self._lock)

    # Writing

    def write(self, weights: Iterable[tuple[str, torch.Tensor]], *, policy_version: int) -> StoredVersion:
        """Write a version: whole, or as deltas against the one that was written before, if that is worth it.

        A version that is written again is written whole, for those that could not take it. Raises `WeightsError` if it
        cannot be written; the newest version is then the one before.
        """
        if self._made_in is None:
            raise InvalidInputError(f"a writer to {self.url} needs a folder to make its versions in (made_in)")
        remove_unfinished(self._made_in, "version-")  # what killed writers left: the folder has one writer
        files = write_weights(self._made_in, weights, policy_version=policy_version)
        with self._explained("written"):
            base = self._copy(files) if self.has_deltas else None
            version = StoredVersion(name=files.folder.name, policy_version=policy_version, files=files.files, base=base)
            self._written.append(version)
            whole = next(each.name for each in reversed(self._written) if each.base is None)
            self._write_newest(json.dumps({"newest": version.name, "whole": whole}).encode())
        return version

    def _copy(self, files: WeightFiles) -> str | None:
        """Copy a version that was made elsewhere; return the base of its deltas, None if it was copied whole."""
        base, own = self._find_base(files), temporary_name(files.folder)
        try:
            paths = {} if base is None else _write_deltas(own, files.folder.with_name(base), files)
            if not paths or sum(path.stat().st_size for path in paths.values()) > _MAX_SHARE * files.num_bytes:
                base, paths = None, {file.name: files.folder / file.name for file in files.files}
            name = files.folder.name
            in_threads(lambda item: self._files.put_file(str(item[1]), self._path(name, item[0])), paths.items())
            self._files.pipe_file(self._path(name, MANIFEST), write_manifest(files.policy_version, files.files, base))
        finally:
            shutil.rmtree(own, ignore_errors=True)
        return base

    def _find_base(self, files: WeightFiles) -> str | None:
        """The version that deltas may be made against."""
        if not self._written or self._written[-1].policy_version == files.policy_version:
            return None
        base = self._written[-1]
        num_deltas = next(k for k, version in enumerate(reversed(self._written)) if version.base is None)
        is_one = num_deltas + 1 < self._full_every and _sizes(base.files) == _sizes(files.files)
        return base.name if is_one else None

    def _write_newest(self, content: bytes) -> None:
        if self._folder is None:
            self._files.pipe_file(self._path(_NEWEST), content)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{_NEWEST}"
        temporary.write_bytes(content)
        flush_to_disk(temporary)
        temporary.replace(self._folder / _NEWEST)  # a server that reads it now reads all of it

    def remove_old(self, num_kept: int) -> None:
        """Remove what none of the newest `num_kept` versions needs, of earlier runs in this place too."""
        if not self._written:
            return
        newest = self._written[-1].name
        first = max(len(self._written) - num_kept, 0)
        while self._written[first].base is not None:
            first -= 1
        self._written = self._written[first:]
        kept = {version.name for version in self._written}
        with self._explained("cleaned"):
            if self.has_deltas and self._made_in is not None:
                for folder in self._made_in.iterdir():
                    if _NAME.fullmatch(folder.name) and folder.name != newest:  # the next delta needs the newest
                        shutil.rmtree(folder, ignore_errors=True)
            self._files.invalidate_cache()
            for path in self._files.ls(self._root, detail=False):
                name = path.rstrip("/").rpartition("/")[2]
                if _NAME.fullmatch(name) and name not in kept:
                    self._files.rm(self._path(name), recursive=True)

    # Reading

    def find_newest(self, *, is_whole: bool = False) -> StoredVersion | None:
        """Find the newest version, or with `is_whole` the newest that needs no other one; None if there is none yet.

        Raises `WeightsError` if the store cannot be read.
        """
        with self._explained("read"):
            try:
                names = self._read_json(_NEWEST)
            except FileNotFoundError:
                return None
            name = str(names["whole" if is_whole else "newest"])
        return self.read(name)

    def read(self, name: str) -> StoredVersion:
        """Read a version's manifest. Raises `WeightsError` if there is none."""
        with self._explained("read", name):
            _check_name(name)
            manifest = self._read_json(name, MANIFEST)
            if manifest["format"] != FORMAT:
                raise InvalidInputError(f"format must be {FORMAT}, got {manifest['format']!r}")
            if (base := manifest["base"]) is not None:
                _check_name(base)
            return StoredVersion(
                name=name,
                policy_version=_parse_version(manifest["policy_version"]),
                files=parse_files(manifest["files"]),
                base=base,
            )

    def fetch(self, version: StoredVersion) -> WeightFiles:
        """Verify the whole files of a version, where they lie or made of deltas here; those made before are removed.

        Raises:
            WeightsError: a part of it is missing, or it is not what was written.
        """
        if self._folder is not None and version.base is None:
            files = version.in_folder(self._folder / version.name)
            files.verify()
            return files
        before = self._local
        if before is not None and before[1].digest == version.digest:
            before[1].verify()
            return before[1]
        try:
            found = self._make(version)
        except WeightsError:
            if before is None or version.base is None:
                raise
            self._local = None  # its files may be damaged
            try:
                found = self._make(version)
            except BaseException:  # an outage, say
                self._local = before
                raise
        self._local = version.name, found
        if before is not None:
            shutil.rmtree(before[1].folder, ignore_errors=True)
        return found

    def _make(self, version: StoredVersion) -> WeightFiles:
        chain = self._find_chain(version)
        if self._cache is None:
            _remove_abandoned()
            self._cache = tempfile.TemporaryDirectory(prefix=_CACHE, ignore_cleanup_errors=True)
            with suppress(OSError):  # a file system without locks, where none is removed either
                self._lock = _lock(Path(self._cache.name))
        folder = Path(self._cache.name, version.name)
        with atomic_folder(folder) as temporary, self._explained("read"):
            in_threads(lambda file: self._make_file(chain, file, temporary / file.name), version.files)
        return version.in_folder(folder)

    def _find_chain(self, version: StoredVersion) -> list[StoredVersion]:
        """A version, its base, ... up to a whole one, or to one whose base is here."""
        chain = [version]
        while (base := chain[-1].base) is not None and not (self._local is not None and self._local[0] == base):
            if base in {link.name for link in chain}:
                raise WeightsError(f"version {base} in {self.url} is its own base: write a whole version")
            chain.append(self.read(base))
            if _sizes(chain[-1].files) != _sizes(version.files):
                raise WeightsError(
                    f"version {base} in {self.url} has other files than {version.name}, whose base it is"
                )
        return chain

    def _make_file(self, chain: Sequence[StoredVersion], file: WeightFile, path: Path) -> None:
        *deltas, last = chain
        if last.base is None:
            self._get(path, last.name, file.name, max_bytes=file.num_bytes)
        else:
            assert self._local is not None
            shutil.copyfile(self._local[1].folder / file.name, path)
            deltas = list(chain)
        for link in reversed(deltas):
            delta = path.with_name(f"{file.name}.delta")
            # A block in which every number changed packs to little more than itself.
            self._get(delta, link.name, delta.name, max_bytes=2 * file.num_bytes + MAX_MANIFEST_BYTES)
            _apply_delta(path, delta)
            delta.unlink()
        with path.open("rb") as made:
            found = hashlib.file_digest(made, "sha256").hexdigest()
        if (path.stat().st_size, found) != (file.num_bytes, file.sha256):
            raise WeightsError(
                f"weight file {file.name} of {chain[0].name} in {self.url} must have {file.num_bytes} bytes with "
                f"SHA-256 {file.sha256[:12]}..., got {path.stat().st_size} with {found[:12]}...: write it again"
            )

    def _get(self, target: Path, *names: str, max_bytes: int) -> None:
        """Copy a file of the store."""
        self._check_size(self._path(*names), max_bytes)
        self._files.get_file(self._path(*names), str(target))

    def _read_json(self, *names: str) -> Any:
        path = self._path(*names)
        self._check_size(path, MAX_MANIFEST_BYTES)
        return read_json(self._files.cat_file(path, start=0, end=MAX_MANIFEST_BYTES), max_bytes=MAX_MANIFEST_BYTES)

    def _check_size(self, path: str, max_bytes: int) -> None:
        """Check what is copied: of a store that is a folder, a pipe would be waited for, and a device fill the disk."""
        found = self._files.info(path)
        if found["type"] != "file" or not (found["size"] or 0) <= max_bytes:
            raise InvalidInputError(
                f"{path} must be a file of at most {max_bytes} bytes, got {found['type']} of {found['size']}"
            )

    def _path(self, *names: str) -> str:
        return "/".join((self._root, *names))

    @contextmanager
    def _explained(self, verb: str, name: str = "") -> Iterator[None]:
        """Raise any error of a store as `WeightsError` that names the store, and the version of this `name`."""
        place = f"version {name} in {self.url}" if name else f"the versions in {self.url}"
        try:
            yield
        except UnbrokenError as error:
            raise error if isinstance(error, WeightsError) else WeightsError(f"{place}: {error}") from error
        except Exception as error:  # each store has its own
            raise WeightsError(f"{place} cannot be {verb}: {type(error).__name__}: {error}"[:2000]) from error


def _remove_abandoned() -> None:
    """Remove the caches of processes that were killed: none locks them, and they are older than one to be locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_CACHE}*"):
        with suppress(OSError):  # it is locked, another user's, or no folder
            lock = _lock(folder)
            if time.time() - os.fstat(lock).st_mtime > _NEW_S:
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int:
    """Open and lock a folder; raises `OSError` if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidInputError(f"a version must be version-NUMBER-DIGEST, got {name!r}")


def _is_url(place: str | Path) -> bool:
    """Whether a place is a URL, such as s3://bucket/run, and not a folder."""
    return isinstance(place, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", place) is not None


def _sizes(files: Iterable[WeightFile]) -> list[tuple[str, int]]:
    return [(file.name, file.num_bytes) for file in files]


def _write_deltas(folder: Path, before: Path, files: WeightFiles) -> dict[str, Path]:
    folder.mkdir()
    paths = {f"{file.name}.delta": folder / f"{file.name}.delta" for file in files.files}

    def write(file: WeightFile) -> None:
        _write_delta(before / file.name, files.folder / file.name, paths[f"{file.name}.delta"])

    in_threads(write, files.files)
    return paths


def _write_delta(base: Path, result: Path, delta: Path) -> None:
    with base.open("rb") as old, result.open("rb") as new, delta.open("wb") as written:
        while block := new.read(_BLOCK_BYTES):
            data = _encode(_words(old.read(_BLOCK_BYTES)), _words(block))
            written.write(len(data).to_bytes(4, "little") + data)


def _apply_delta(path: Path, delta: Path) -> None:
    """Change a file into the one that a delta was made for."""
    with path.open("r+b") as changed, delta.open("rb") as read:
        while head := read.read(4):
            place = changed.tell()
            block = changed.read(_BLOCK_BYTES)
            result = _decode(read.read(int.from_bytes(head, "little")), _words(block))
            changed.seek(place)
            changed.write(result.tobytes()[: len(block)])


def _words(block: bytes) -> Words:
    return np.frombuffer(block + b"\0" * (len(block) % 2), "<u2")


def _encode(old: Words, new: Words) -> bytes:
    """What changed in a block."""
    changed = np.flatnonzero(old != new)
    num_skips, rest = np.divmod(np.diff(changed, prepend=0).astype(np.uint32), 255)
    steps = np.full(len(changed) + int(num_skips.sum()), 255, np.uint8)
    steps[np.cumsum(num_skips + 1) - 1] = rest
    low_and_high = (old[changed] ^ new[changed]).view(np.uint8).reshape(-1, 2).T
    return zlib.compress(len(changed).to_bytes(4, "little") + low_and_high.tobytes() + steps.tobytes(), 1)


def _decode(data: bytes, old: Words) -> Words:
    """The block of which `_encode` has made `data`."""
    raw = zlib.decompressobj().decompress(data, 4 + 4 * len(old))
    number = int.from_bytes(raw[:4], "little")
    low_and_high = np.frombuffer(raw, np.uint8, 2 * number, 4).reshape(2, -1)
    steps = np.frombuffer(raw, np.uint8, offset=4 + 2 * number)
    changed = np.cumsum(steps, dtype=np.int64)[steps != 255]
    new = old.copy()
    new[changed] ^= np.ascontiguousarray(low_and_high.T).view("<u2")[:, 0]
    return new


def _parse_version(value: Any) -> int:
    """Read the policy version of a manifest; raises `InvalidInputError` unless it is an integer that a row can have."""
    if type(value) is not int or not 0 <= value < 2**31:
        raise InvalidInputError(f"policy_version must be an integer in [0, 2**31), got {value!r}")
    return value
