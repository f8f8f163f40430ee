"""The one way in for what others wrote: files, JSON of a server. Each reader has limits, and hangs on nothing.

    a pipe, a device, a link to one    refused: it is no regular file
    bytes, levels, numbers             refused above a limit that the caller names, with its value

`tools/check_readers.py` counts the reads elsewhere, each with whose files they are; `tests/unit/test_attacks.py` has
one list of hostile files for all readers.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from unbroken.errors import InvalidInputError

MAX_ANSWER_BYTES = 100 << 20
"""Of a server of environments; an observation may have images."""
MAX_VALUES = 1 << 20
"""Lists, objects and texts of one piece of JSON: `[],` has 3 bytes, and a list in memory 64."""
_VALUE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{]', re.DOTALL)
MAX_ROWS_BYTES = 1 << 30
"""Of a file of rows that is held in memory as a whole."""
MAX_FACTS_BYTES = 64 << 20
"""Of a file of facts: a report, a recipe, a state, a config."""
MAX_TOKENIZER_BYTES = 200 << 20
"""Of a `tokenizer.json`."""
MAX_KEYS_BYTES = 1 << 20
"""Of a file of keys."""
_DIGITS = bytes(ord("0") if chr(byte) in "0123456789" else 32 for byte in range(256))
_LONG_INTEGER = re.compile(rb"(?<![.0-9])[0-9]{19}")
MAX_DEPTH = 100
"""Lists and objects in each other. What walks them later is recursive, as JSON's own encoder is."""


def read_json(data: bytes | str, *, max_bytes: int, is_finite: bool = True) -> Any:
    """Parse JSON; with `is_finite` False its numbers may be Infinity, as those of settings.

    Raises:
        InvalidInputError: it is too long, is not JSON, or is not as `check_json` wants it.
    """
    if len(data) > max_bytes:
        raise InvalidInputError(f"JSON must have at most {max_bytes} bytes, got {len(data)}")
    written = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if count_values(written, count_opened(written)) > MAX_VALUES:
        raise InvalidInputError(f"JSON must have at most {MAX_VALUES} lists, objects and texts, got more")
    try:
        value = json.loads(data, parse_constant=_refuse_constant if is_finite else float)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"it must be JSON: {type(error).__name__}: {error}") from None
    check_json(value, is_finite=is_finite)
    return value


def parse_exactly(body: bytes, parse: Callable[[bytes], Any]) -> Any:
    """Parse JSON by `parse`, which is orjson's, but for integers beyond 64 bits, of which that makes floats.

    Raises:
        InvalidInputError: an integer has more digits than Python reads.
    """
    value = parse(body)
    # The digits of a number are found ten times as fast once all are the same one.
    if b"0" * 19 not in body.translate(_DIGITS) or _LONG_INTEGER.search(body) is None:
        return value
    try:
        return json.loads(body)
    except ValueError as error:
        raise InvalidInputError(f"an integer in JSON is too long: {error}") from None


def count_opened(body: bytes) -> int:
    """The lists and objects of JSON, without parsing it, and these characters inside texts."""
    return body.count(b"[") + body.count(b"{")


def bound_values(body: bytes, num_opened: int) -> int:
    """At least as many as its lists, objects and texts; `num_opened` is that of `count_opened`."""
    return num_opened + body.count(b'"') // 2


def count_values(body: bytes, num_opened: int) -> int:
    """The lists, objects and texts of JSON, without parsing it; any number above `MAX_VALUES` if there are more, and 0
    if there are surely not so many: it has `num_opened` brackets and braces.
    """
    if bound_values(body, num_opened) <= MAX_VALUES:
        return 0
    if b'"' not in body:  # no bracket is inside a text, and to find a million one by one takes a sixth of a second
        return num_opened
    return sum(1 for _ in itertools.islice(_VALUE.finditer(body), MAX_VALUES + 1))


def check_json(value: Any, *, is_finite: bool = True) -> None:
    """Check a value of parsed JSON.

    Raises:
        InvalidInputError: it is nested more than `MAX_DEPTH` deep, or a number is not finite in float64 (`is_finite`).
    """
    level = [[value]]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for items in level for inner in _check_items(items, is_finite)]
        if not level:
            return
    raise InvalidInputError(f"JSON must be nested at most {MAX_DEPTH} deep")


def read_file(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Read a whole file that others name or write.

    Raises:
        OSError: it is not there, or is no regular file: a pipe would be waited for, and some devices never end.
        InvalidInputError: it is longer.
    """
    with _open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > max_bytes else file.read(max_bytes + 1)  # it may grow while it is read
    if max(size, len(data)) > max_bytes:
        raise InvalidInputError(f"{path} must have at most {max_bytes} bytes, got {max(size, len(data))}")
    return data


def read_text(path: str | os.PathLike[str], *, max_bytes: int) -> str:
    """Read a whole text file in UTF-8, with line ends as `Path.read_text` has them; errors as in `read_file`."""
    data = read_file(path, max_bytes=max_bytes)
    try:
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} must be text in UTF-8, but byte {error.start} is not") from None


def read_json_file(path: str | os.PathLike[str], *, max_bytes: int, is_finite: bool = True) -> Any:
    """Read a file of JSON; errors as in `read_file` and `read_json`."""
    return read_json(read_file(path, max_bytes=max_bytes), max_bytes=max_bytes, is_finite=is_finite)


def read_end(path: str | os.PathLike[str], *, max_bytes: int) -> str:
    """Read the last bytes of a text file, such as a log, however long it is; errors as in `read_file`."""
    with _open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
        return file.read(max_bytes).decode("utf-8", "replace")


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise `OSError` unless a library that opens this file finds a regular one."""
    _open_regular(path).close()


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
    return _open_descriptor(descriptor, "/".join(parts))


def _open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:  # a NUL in its name
        raise FileNotFoundError(f"{path!r}: {error}") from None
    return _open_descriptor(descriptor, str(path))


def _open_descriptor(descriptor: int, name: str) -> BinaryIO:
    # `os.fdopen` would leave the descriptor of a folder open.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{name} is no regular file")
    return os.fdopen(descriptor, "rb")


def _check_items(items: list[Any], is_finite: bool) -> list[list[Any]]:
    """Check the numbers among the items; returns the items of each list and object among them."""
    kinds = set(map(type, items))
    if is_finite and (float in kinds or int in kinds):
        numbers = items if kinds <= {float, int} else [each for each in items if type(each) in (float, int)]
        if not _are_finite(numbers):
            raise InvalidInputError("numbers in JSON must be finite in float64")
    if kinds.isdisjoint((list, dict)):
        return []
    return [list(each.values()) if type(each) is dict else each for each in items if type(each) in (list, dict)]


def _are_finite(numbers: list[Any]) -> bool:
    try:
        return all(map(math.isfinite, numbers))
    except OverflowError:  # an int of more than 308 digits
        return False


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidInputError(f"numbers in JSON must be finite, got {name}")
