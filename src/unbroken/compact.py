"""The compact form of answers on the wire: JSON with its arrays beside it as raw bytes. Version 1.

A list of ids in JSON costs about 6 bytes an id and a logprob 20; here both cost 4. Layout, all numbers little-endian:

    8 bytes   the magic number: b"UNBRKN", then the version as two bytes
    4 bytes   length of the head
    head      JSON; where an array stands, {"$array": [dtype, shape, offset]}, the offset counted from the body's start
    body      from the next multiple of 8 on: each array in C order, each from a multiple of 8 on

An array's dtype is one of "<i4", "<f4", "|b1". What is no array is JSON as ever; NaN and infinity are no JSON.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import InvalidInputError

MEDIA_TYPE = "application/vnd.unbroken.v1"
"""In `Accept`, asks for an answer in this form; in `Content-Type`, says that a body has it."""

_MAGIC = b"UNBRKN\x00\x01"
_KEY = "$array"
_DTYPES = ("<i4", "<f4", "|b1")
_ALIGNMENT = 8


def encode(value: Any) -> bytes:
    """Encode a JSON-like value in which numpy arrays of int32, float32 and bool may stand.

    Raises:
        InvalidInputError: an array of another type, or a value that is no JSON.
    """
    body = bytearray()
    tree = _without_arrays(value, body)
    try:
        head = json.dumps(tree, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"a value cannot be written as JSON: {error}") from None
    start = len(_MAGIC) + 4 + len(head)
    return b"".join([_MAGIC, struct.pack("<I", len(head)), head, b"\x00" * _padding(start), body])


def decode(data: bytes) -> Any:
    """Decode what `encode` wrote; arrays are read-only views of `data`.

    Raises:
        InvalidInputError: `data` is cut, of another version, or its head does not fit its body.
    """
    if data[:8] != _MAGIC:
        raise InvalidInputError(f"a compact body must begin with {_MAGIC!r}, got {bytes(data[:8])!r}")
    if len(data) < 12:
        raise InvalidInputError(f"a compact body must hold at least 12 bytes, got {len(data)}")
    (head_length,) = struct.unpack_from("<I", data, 8)
    start = 12 + head_length
    if start > len(data):
        raise InvalidInputError(f"the head of a compact body says {head_length} bytes, of which {len(data) - 12} came")
    try:
        tree = json.loads(data[12:start])
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the head of a compact body is no JSON: {error}") from None
    return _with_arrays(tree, memoryview(data)[start + _padding(start) :])


def _without_arrays(value: Any, body: bytearray) -> Any:
    """`value` with its arrays moved to the end of `body`."""
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("<").str
        if dtype not in _DTYPES:
            raise InvalidInputError(f"an array must be of int32, float32 or bool, got {value.dtype}")
        offset = len(body)
        body += np.ascontiguousarray(value, dtype=dtype).tobytes()
        body += b"\x00" * _padding(len(body))
        return {_KEY: [dtype, list(value.shape), offset]}
    if isinstance(value, Mapping):
        if _KEY in value:
            raise InvalidInputError(f"a key must not be {_KEY!r}: it marks arrays")
        return {key: _without_arrays(item, body) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_arrays(item, body) for item in value]
    return value


def _with_arrays(value: Any, body: memoryview) -> Any:
    if isinstance(value, dict):
        return _array(value[_KEY], body) if _KEY in value else {k: _with_arrays(v, body) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_arrays(item, body) for item in value]
    return value


def _array(described: Any, body: memoryview) -> NDArray[Any]:
    match described:
        case [str(dtype), [*shape], int(offset)] if (
            dtype in _DTYPES and offset >= 0 and all(type(size) is int and size >= 0 for size in shape)
        ):
            count = math.prod(shape)
        case _:
            raise InvalidInputError(f"an array must be described by dtype, shape and offset, got {described!r}")
    stop = offset + count * np.dtype(dtype).itemsize
    if stop > len(body):
        raise InvalidInputError(f"an array ends at byte {stop} of a body of {len(body)} bytes")
    return np.frombuffer(body[offset:stop], dtype=dtype, count=count).reshape(shape)


def _padding(length: int) -> int:
    return -length % _ALIGNMENT
