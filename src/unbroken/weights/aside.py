"""Folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which gets the name `folder` when the block ends well; otherwise nothing is left of it.

    A process that is killed in the block leaves `.NAME-HEX` beside it, which `remove_unfinished` takes away. Files must
    be on the disk (`to_disk`) before the block ends. A folder of that name is replaced.

    Raises:
        OSError: it cannot be written.
    """
    aside = folder.parent / f".{folder.name}-{uuid.uuid4().hex}"
    try:
        aside.mkdir(parents=True)
        yield aside
        to_disk(aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        to_disk(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_whole(folder: Path) -> None:
    """Remove a folder so that, if the process is killed, it is never found with half of its files."""
    aside = folder.parent / f".{folder.name}-{uuid.uuid4().hex}"
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(parent: Path, prefix: str) -> None:
    """Remove what killed processes left of folders whose name begins with `prefix`."""
    for path in parent.glob(f".{prefix}*-{'[0-9a-f]' * 32}"):
        shutil.rmtree(path, ignore_errors=True)


def to_disk(path: Path) -> None:
    """Return once a file's contents, or a folder's names, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
