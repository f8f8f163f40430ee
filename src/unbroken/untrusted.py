"""Reads data that is not trusted, with limits: JSON of a server, files of a folder of another person."""

from __future__ import annotations

import json
import math
import os
import stat
from typing import Any, BinaryIO, NoReturn

from unbroken.errors import InvalidInputError

MAX_ANSWER_BYTES = 100 << 20
"""Of a server of environments; an observation may have images."""
MAX_DEPTH = 100
"""Lists and objects in each other. What walks them later is recursive, as JSON's own encoder is."""


def read_json(data: bytes | str, *, max_bytes: int) -> Any:
    """Parse JSON.

    Raises:
        InvalidInputError: it is too long, is not JSON, or is not as `check_json` wants it.
    """
    if len(data) > max_bytes:
        raise InvalidInputError(f"JSON must have at most {max_bytes} bytes, got {len(data)}")
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"it must be JSON: {type(error).__name__}: {error}") from None
    check_json(value)
    return value


def check_json(value: Any) -> None:
    """Check a value of parsed JSON.

    Raises:
        InvalidInputError: it is nested more than `MAX_DEPTH` deep, or a number is not finite in float64.
    """
    level = [[value]]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for items in level for inner in _check_items(items)]
        if not level:
            return
    raise InvalidInputError(f"JSON must be nested at most {MAX_DEPTH} deep")


def read_file(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Read a whole file that somebody else names or writes.

    Raises:
        OSError: it is not there, or is no regular file: a pipe would be waited for, and some devices never end.
        InvalidInputError: it is longer.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileNotFoundError(f"{path} is no regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise InvalidInputError(f"{path} must have at most {max_bytes} bytes")
    return data


def open_inside(folder: str | os.PathLike[str], *parts: str) -> BinaryIO:
    """Open a file below a folder by the names on the way to it. No link is followed: it could lead anywhere.

    Raises:
        OSError: it is not there, is no regular file, or a name is that of a link.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for number, part in enumerate(parts, 1):
        kind = os.O_NONBLOCK if number == len(parts) else os.O_DIRECTORY  # opening a pipe would wait for its writer
        try:
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = inner
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(f"{'/'.join(parts)} is no regular file")
    return file


def _check_items(items: list[Any]) -> list[list[Any]]:
    """Check the numbers among the items; returns the items of each list and object among them."""
    kinds = set(map(type, items))
    if float in kinds or int in kinds:
        numbers = items if kinds <= {float, int} else [each for each in items if type(each) in (float, int)]
        try:
            are_finite = all(map(math.isfinite, numbers))
        except OverflowError:
            are_finite = False
        if not are_finite:
            raise InvalidInputError("numbers in JSON must be finite in float64")
    if kinds.isdisjoint((list, dict)):
        return []
    return [list(each.values()) if type(each) is dict else each for each in items if type(each) in (list, dict)]


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidInputError(f"numbers in JSON must be finite, got {name}")
