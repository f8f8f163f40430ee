"""Folders that exist whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; it is renamed to `folder` if the block succeeds, and removed otherwise.

    A process that is killed in the block leaves `.NAME-HEX` beside `folder`; `remove_unfinished` removes it. Flush the
    files (`flush_to_disk`) before the block ends. An existing folder of that name is replaced. Raises `OSError` if the
    folder cannot be written.
    """
    temporary = temporary_name(folder)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        complete_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def temporary_name(folder: Path, key: str | None = None) -> Path:
    """Where to fill `folder`; several processes that fill it agree on a `key` of 32 hexadecimal digits."""
    return folder.parent / f".{folder.name}-{key or uuid.uuid4().hex}"


def complete_folder(temporary: Path, folder: Path) -> None:
    """Rename a folder whose files are flushed to the disk; an existing folder of the name is replaced."""
    flush_to_disk(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    flush_to_disk(folder.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder; a process that is killed in between leaves no half of it under its name."""
    temporary = temporary_name(folder)
    folder.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def remove_unfinished(parent: Path, prefix: str) -> None:
    """Remove what killed processes left of folders whose name begins with `prefix`."""
    for path in parent.glob(f".{prefix}*-{'[0-9a-f]' * 32}"):
        shutil.rmtree(path, ignore_errors=True)


def flush_to_disk(path: Path) -> None:
    """Return once a file's contents, or a folder's names, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
