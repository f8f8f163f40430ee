"""The compact wire format for answers: JSON followed by its arrays as raw bytes. Version 1.

In JSON an id takes about 6 bytes and a logprob 20; here each takes 4. Layout, all numbers little-endian:

    8 bytes   magic number: b"UNBRKN", then the version as two bytes
    4 bytes   length of the head
    head      JSON with {"$array": [dtype, shape, offset]} in place of each array; offsets count from the body's start
    body      begins at the next multiple of 8: the arrays in C order, each at a multiple of 8

An array's dtype is one of "<i4", "<f4", "|b1". NaN and infinity are allowed only in arrays.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import InvalidInputError

MEDIA_TYPE = "application/vnd.unbroken.v1"
"""`Accept` value to request this format, and `Content-Type` of a body in it."""

ACCEPT_HEADER = "Accept-Post"
"""The header of an answer that says which other form a path takes bodies in: `MEDIA_TYPE`."""

_MAGIC = b"UNBRKN\x00\x01"
_KEY = "$array"
_DTYPES = ("<i4", "<f4", "|b1")
_ALIGNMENT = 8


def encode(value: Any) -> bytes:
    """Encode a JSON-like value with numpy arrays of int32, float32 and bool; `InvalidInputError` for anything else."""
    body = bytearray()
    tree = _extract_arrays(value, body)
    try:
        head = json.dumps(tree, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"a value cannot be written as JSON: {error}") from None
    start = len(_MAGIC) + 4 + len(head)
    return b"".join([_MAGIC, struct.pack("<I", len(head)), head, b"\x00" * _count_padding(start), body])


def decode(data: bytes, *, parse: Callable[[bytes], Any] = json.loads, max_arrays: float = math.inf) -> Any:
    """Decode what `encode` wrote; arrays are read-only views of `data`. `parse` reads the JSON of the head.

    Raises:
        InvalidInputError: `data` is incomplete, of another version, its head does not match its body, or it has more
            than `max_arrays`, which is found before the next one is made.
    """
    if data[:8] != _MAGIC:
        raise InvalidInputError(f"a compact body must begin with {_MAGIC!r}, got {bytes(data[:8])!r}")
    if len(data) < 12:
        raise InvalidInputError(f"a compact body must hold at least 12 bytes, got {len(data)}")
    (head_length,) = struct.unpack_from("<I", data, 8)
    start = 12 + head_length
    if start > len(data):
        raise InvalidInputError(f"the head of a compact body must have {head_length} bytes, got {len(data) - 12}")
    try:
        tree = parse(data[12:start])
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the head of a compact body is not JSON: {error}") from None
    try:
        return _insert_arrays(tree, memoryview(data)[start + _count_padding(start) :], itertools.count(1), max_arrays)
    except RecursionError as error:
        raise InvalidInputError(f"the head of a compact body is nested too deeply: {error}") from None


def _extract_arrays(value: Any, body: bytearray) -> Any:
    """Move the arrays of `value` to `body`, and return `value` with descriptions in their place."""
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("<").str
        if dtype not in _DTYPES:
            raise InvalidInputError(f"an array must be of int32, float32 or bool, got {value.dtype}")
        offset = len(body)
        body += np.ascontiguousarray(value, dtype=dtype).tobytes()
        body += b"\x00" * _count_padding(len(body))
        return {_KEY: [dtype, list(value.shape), offset]}
    if isinstance(value, Mapping):
        if _KEY in value:
            raise InvalidInputError(f"a key must not be {_KEY!r}: it marks arrays")
        return {key: _extract_arrays(item, body) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_extract_arrays(item, body) for item in value]
    return value


def _insert_arrays(value: Any, body: memoryview, numbers: Iterator[int], most: float) -> Any:
    if isinstance(value, dict):
        if _KEY in value:
            if next(numbers) > most:
                raise InvalidInputError(f"a compact body may have at most {most} arrays, got more")
            return _read_array(value[_KEY], body)
        return {key: _insert_arrays(item, body, numbers, most) for key, item in value.items()}
    if isinstance(value, list):
        return [_insert_arrays(item, body, numbers, most) for item in value]
    return value


def _read_array(description: Any, body: memoryview) -> NDArray[Any]:
    match description:
        case [str(dtype), [*shape], int(offset)] if (
            dtype in _DTYPES
            and type(offset) is int
            and offset >= 0
            and all(type(size) is int and size >= 0 for size in shape)
        ):
            count = math.prod(shape)
        case _:
            raise InvalidInputError(f"an array must be described by dtype, shape and offset, got {description!r}")
    stop = offset + count * np.dtype(dtype).itemsize
    if stop > len(body):
        raise InvalidInputError(f"an array ends at byte {stop} of a body of {len(body)} bytes")
    try:
        return np.frombuffer(body[offset:stop], dtype=dtype, count=count).reshape(shape)
    except (ValueError, OverflowError) as error:  # e.g. 65 dimensions, or one of 2**70 with one of 0
        raise InvalidInputError(f"an array cannot have the shape {description[1]!r}: {error}") from None


def _count_padding(length: int) -> int:
    return -length % _ALIGNMENT
