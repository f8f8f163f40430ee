"""Writes the pages and all that they show into a folder, to be opened without a server and sent to others.

page/index.html                            the page
page/data/run/0/step/12.js                 one object of `resources`, as a script: a browser reads no JSON from a disk
page/images/run/0/image/SHA256
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

from unbroken.errors import InvalidInputError
from unbroken.viewer.assets import ASSETS, read_asset
from unbroken.viewer.resources import Resources

_MARK = "unbroken-view.json"
_SERVED = b'data-source="api"'
_EXPORTED = b'data-source="files"'


def export_page(resources: Resources, folder: Path) -> int:
    """Write the page into `folder`, in place of an earlier export; returns how many files it has.

    Raises:
        InvalidInputError: the folder holds other files, or cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(f"--export must be a folder, got the file {folder}")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _MARK).exists():
        raise InvalidInputError(f"--export must be a new or empty folder or an earlier export, got {folder}")
    try:
        return _write(resources, folder)
    except OSError as error:
        raise InvalidInputError(f"--export {folder} cannot be written: {error}") from error


def _write(resources: Resources, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).write_text('{"format": 1}\n', "utf-8")
    for part in ("data", "images"):
        shutil.rmtree(folder / part, ignore_errors=True)
    num_files = len(ASSETS)
    for name in ASSETS:
        (folder / name).write_bytes(read_asset(name).replace(_SERVED, _EXPORTED))
    for path in resources.list_paths():
        with suppress(LookupError, InvalidInputError):  # a run or a gateway that goes on may delete what was listed
            _write_file(folder / "data" / f"{path}.js", to_script(path, resources.get(path)))
            num_files += 1
    for path in resources.list_images():
        with suppress(LookupError):
            _write_file(folder / "images" / path, resources.get_image(path))
            num_files += 1
    return num_files


def to_script(path: str, value: object) -> bytes:
    """An object as a script that hands it to the page. JSON in ASCII is a JavaScript expression."""
    return f"receive({json.dumps(path)}, {json.dumps(value, separators=(',', ':'))});\n".encode()


def _write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
