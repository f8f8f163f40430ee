"""Files of a task's root folder, reached from outside: no link that was made inside is followed.

Such a link may lead to a folder of this machine. No process of the task may run meanwhile.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path, PurePosixPath

from unbroken.errors import TaskError


def make_folder(root: Path, path: str) -> Path:
    """Make a folder of a task's root, and replace whatever the task's processes put in its way; returns its place.

    They may have taken our rights to it, and to the folders that it is in.
    """
    place = root
    _take_rights(place)
    for part in PurePosixPath(path).parts[1:]:
        if part == "..":
            raise TaskError(f"{path!r} must be a path without ..")
        place = place / part
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            place.unlink()
        place.mkdir(exist_ok=True)
        _take_rights(place)
    return place


def make_link(root: Path, path: str, target: Path) -> None:
    """Make a link in a task's root, and replace whatever the task's processes put in its place."""
    place = make_folder(root, str(PurePosixPath(path).parent)) / PurePosixPath(path).name
    if place.is_symlink() and place.readlink() == target:
        return
    if place.is_dir() and not place.is_symlink():
        remove_folder(root, path)
    place.unlink(missing_ok=True)
    place.symlink_to(target)


def remove_folder(root: Path, path: str) -> Path:
    """Remove a folder of a task's root, whatever its permissions; returns its place."""
    place = make_folder(root, path)
    for parent, names, _ in os.walk(place):
        for name in names:
            if not Path(parent, name).is_symlink():
                _take_rights(Path(parent, name))
    shutil.rmtree(place)
    return place


def replace_folder(root: Path, path: str, source: Path) -> Path:
    """Copy the folder `source` to a task's root, instead of whatever is there; returns its place."""
    place = remove_folder(root, path)
    shutil.copytree(source, place)
    return place


def find_file(root: Path, path: str) -> Path | None:
    """A regular file of a task's root, None if it does not exist or a link leads out of the root."""
    try:
        place = (root / path.lstrip("/")).resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        return None
    return place if place.is_relative_to(root.resolve()) and place.is_file() else None


def find_link(root: Path, path: str) -> str | None:
    """The first part of a path that is a link, as the task's processes know it; None if none is."""
    place = root
    for part in PurePosixPath(path).parts[1:]:
        place = place / part
        if place.is_symlink():
            return f"/{place.relative_to(root)}"
    return None


def _take_rights(folder: Path) -> None:
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        folder.chmod(mode | stat.S_IRWXU)
