"""Versions of the weights in a store, an object store say: most of them as what changed, from which servers make files.

s3://bucket/run/
newest.json                      the names of the newest version and of the newest whole one
version-00000006-5a0c.../        manifest.json, 00000.safetensors ...
version-00000007-91fe.../        manifest.json, which names its base, 00000.safetensors.delta ...

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fsspec.core
import numpy as np
import numpy.typing as npt

from unbroken.errors import InvalidInputError, UnbrokenError, WeightsError
from unbroken.untrusted import read_json
from unbroken.weights.files import MAX_MANIFEST_BYTES, WeightFile, WeightFiles, parse_files, parse_version
from unbroken.weights.folders import atomic_folder, temporary_name

_MANIFEST, _NEWEST = "manifest.json", "newest.json"
_FORMAT = 1
_NAME = re.compile(r"version-\d{8,}-[0-9a-f]{12}")
_LOCAL = ("file", "local")
_BLOCK_BYTES = 2**24
_MAX_SHARE = 0.5
"""A delta that has a larger share of the whole files' bytes is not worth its chain."""
_MAX_THREADS = 8
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
        return WeightFiles(folder=Path(), policy_version=self.policy_version, files=self.files).digest


def is_store(location: str) -> bool:
    """Whether a location is a URL, such as s3://bucket/run, and not a folder."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", location) is not None


class VersionStore:
    """One trainer's versions. Each process that writes or reads has its own object; its methods block."""

    def __init__(self, url: str, *, full_every: int = 10) -> None:
        """`url` is one of fsspec's. Every `full_every`-th version is written whole: a server that comes reads it, and
        the deltas since.

        Raises:
            InvalidInputError: the URL cannot be used, or needs a package that is not installed.
        """
        if full_every < 1:
            raise InvalidInputError(f"full_every must be at least 1, got {full_every}")
        self.url = url.rstrip("/")
        self._full_every = full_every
        protocol = self.url.partition("://")[0].lower()
        try:
            options = {"auto_mkdir": True} if protocol in _LOCAL else {}
            self._files, self._root = fsspec.core.url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:
            raise InvalidInputError(f"the store {self.url} cannot be used: {error}") from error
        self._written: list[StoredVersion] = []
        """Versions of this object's, the newest last: those since the whole one that the oldest kept one needs."""
        self._local: tuple[str, WeightFiles] | None = None
        """The version that was made here last: its name, and its files."""
        self._cache: tempfile.TemporaryDirectory[str] | None = None
        self._lock = -1
        """Of the cache, which the system frees when this process ends, however it ends."""

    def close(self) -> None:
        """Remove what was made here."""
        self._local = None
        if self._cache is not None:
            self._cache.cleanup()
            self._cache = None
            with suppress(OSError):
                os.close(self._lock)

    # Writing

    def write(self, files: WeightFiles, *, before: WeightFiles | None) -> StoredVersion:
        """Write a version, as deltas against the one that was written `before`, whose files are still there, if that
        is worth it. Raises `WeightsError` if it cannot be written.
        """
        name = f"version-{files.policy_version:08}-{files.digest[:12]}"
        base = self._find_base(name, files, before)
        own = temporary_name(files.folder)
        try:
            with self._explained("written"):
                paths = {} if base is None or before is None else _write_deltas(own, before, files)
                if not paths or sum(path.stat().st_size for path in paths.values()) > _MAX_SHARE * files.num_bytes:
                    base, paths = None, {file.name: files.folder / file.name for file in files.files}
                _in_threads(lambda item: self._files.put_file(str(item[1]), self._path(name, item[0])), paths.items())
                version = StoredVersion(name=name, policy_version=files.policy_version, files=files.files, base=base)
                manifest = {"format": _FORMAT, **asdict(version)}
                self._files.pipe_file(self._path(name, _MANIFEST), json.dumps(manifest, indent=1).encode())
                self._written.append(version)
                newest = {"newest": name, "whole": next(v.name for v in reversed(self._written) if v.base is None)}
                self._files.pipe_file(self._path(_NEWEST), json.dumps(newest).encode())
        finally:
            shutil.rmtree(own, ignore_errors=True)
        return version

    def _find_base(self, name: str, files: WeightFiles, before: WeightFiles | None) -> str | None:
        """The version that deltas may be made against."""
        if before is None or not self._written or self._written[-1].digest != before.digest:
            return None
        base = self._written[-1]
        num_deltas = next(k for k, version in enumerate(reversed(self._written)) if version.base is None)
        is_one = num_deltas + 1 < self._full_every and base.name != name and _sizes(base.files) == _sizes(files.files)
        return base.name if is_one else None

    def remove_old(self, num_kept: int) -> None:
        """Remove what none of the newest `num_kept` versions needs, of earlier runs in this place too."""
        first = max(len(self._written) - num_kept, 0)
        while self._written[first].base is not None:
            first -= 1
        self._written = self._written[first:]
        kept = {version.name for version in self._written}
        with self._explained("cleaned"):
            self._files.invalidate_cache()
            for path in self._files.ls(self._root, detail=False):
                name = path.rstrip("/").rpartition("/")[2]
                if _NAME.fullmatch(name) and name not in kept:
                    self._files.rm(self._path(name), recursive=True)

    # Reading

    def find_newest(self) -> StoredVersion | None:
        """Find the newest version; None if there is none yet. Raises `WeightsError` if the store cannot be read."""
        return self._find("newest")

    def find_whole(self) -> StoredVersion | None:
        """Find the newest version that needs no other one, as `find_newest`."""
        return self._find("whole")

    def read(self, name: str) -> StoredVersion:
        """Read a version's manifest. Raises `WeightsError` if there is none."""
        if _NAME.fullmatch(name) is None:
            raise WeightsError(f"a version in {self.url} must be version-NUMBER-DIGEST, got {name!r}")
        with self._explained("read"):
            manifest = self._read_json(name, _MANIFEST)
            if manifest["format"] != _FORMAT:
                raise InvalidInputError(f"format must be {_FORMAT}, got {manifest['format']!r}")
            return StoredVersion(
                name=name,
                policy_version=parse_version(manifest["policy_version"]),
                files=parse_files(manifest["files"]),
                base=None if manifest["base"] is None else str(manifest["base"]),
            )

    def fetch(self, version: StoredVersion) -> WeightFiles:
        """Make the whole files of a version on this machine, and verify them; those of the one before are removed.

        Raises:
            WeightsError: a part of it is missing, or it is not what was written.
        """
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
            _in_threads(lambda file: self._make_file(chain, file, temporary / file.name), version.files)
        return WeightFiles(folder=folder, policy_version=version.policy_version, files=version.files)

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

    def _find(self, key: str) -> StoredVersion | None:
        with self._explained("read"):
            try:
                names = self._read_json(_NEWEST)
            except FileNotFoundError:
                return None
            name = str(names[key])
        return self.read(name)

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
    def _explained(self, verb: str) -> Iterator[None]:
        try:
            yield
        except UnbrokenError as error:
            raise error if isinstance(error, WeightsError) else WeightsError(f"{self.url}: {error}") from error
        except Exception as error:  # each store has its own
            raise WeightsError(
                f"the versions in {self.url} cannot be {verb}: {type(error).__name__}: {error}"[:2000]
            ) from error


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


def _sizes(files: Iterable[WeightFile]) -> list[tuple[str, int]]:
    return [(file.name, file.num_bytes) for file in files]


def _in_threads(work: Callable[[Any], object], items: Iterable[Any]) -> None:
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        for _ in threads.map(work, items):
            pass


def _write_deltas(folder: Path, before: WeightFiles, files: WeightFiles) -> dict[str, Path]:
    folder.mkdir()
    paths = {f"{file.name}.delta": folder / f"{file.name}.delta" for file in files.files}

    def write(file: WeightFile) -> None:
        _write_delta(before.folder / file.name, files.folder / file.name, paths[f"{file.name}.delta"])

    _in_threads(write, files.files)
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
