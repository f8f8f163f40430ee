"""Checks that a PNG file has all of its rows: Pillow leaves those black that a file's data ends before."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""By colour type."""
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column, first row, and the steps between columns and rows of each pass of an interlaced file."""
_CHUNK_BYTES = 2**20


def check_png_rows(data: bytes) -> None:
    """Raise `ValueError` if the data of a PNG file, whose header is valid, end before its last row."""
    width, height, bits, colour, _, _, interlace = struct.unpack_from(">IIBBBBB", data, 16)
    expected = count_png_bytes(width, height, bits * _CHANNELS[colour], interlaced=bool(interlace))
    decoder = zlib.decompressobj()
    found = 0
    for piece in _find_data(data):
        while piece and found < expected and not decoder.eof:
            found += len(decoder.decompress(piece, _CHUNK_BYTES))
            piece = decoder.unconsumed_tail
    if found < expected:
        raise ValueError(f"it has {found} of {expected} bytes of pixels")


def count_png_bytes(width: int, height: int, bits: int, *, interlaced: bool) -> int:
    """Count the bytes of all rows, each with its filter byte, at `bits` for a pixel."""
    passes = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    sizes = [(-((x - width) // dx), -((y - height) // dy)) for x, y, dx, dy in passes]
    return sum(rows * (1 + (columns * bits + 7) // 8) for columns, rows in sizes if columns > 0 and rows > 0)


def _find_data(data: bytes) -> Iterator[bytes]:
    """Yield the content of the file's IDAT chunks."""
    position = 8
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"IDAT":
            yield data[position + 8 : position + 8 + length]
        position += 12 + length
