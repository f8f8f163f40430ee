"""Checks that a JPEG file has all of its data: decoders fill up what a scan lacks with grey, and only warn."""

from __future__ import annotations

import io
import random
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

_SCAN, _END = 0xDA, 0xD9
_RESTARTS = range(0xD0, 0xD8)
_ALONE = frozenset({0x01, 0xD8, *_RESTARTS})
"""Markers without a length."""
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_FILLER = bytes(random.Random(0).choices(range(255), k=1024))
"""Bytes without a marker, and not from a picture."""
_MAX_WHOLE_PIXELS = 2**20


def check_jpeg_data(picture: Image.Image, data: bytes) -> None:
    """Raise `ValueError` if a scan of a JPEG file ends before its last row. `picture` is the file, opened.

    A decoder ignores bytes between the end of a scan and the next marker, unless data are missing: then it takes them
    for the data. So a file that lacks nothing is the same picture with and without such bytes.
    """
    from PIL import ImageChops

    found = _decode(data) if _is_large(picture) else picture
    found.load()
    filled = _decode(_fill_up(data))
    missing = ImageChops.difference(found, filled).getbbox(alpha_only=False)
    if missing is not None:
        raise ValueError(f"its data end {missing[1] / found.height:.0%} from the top")


def _is_large(picture: Image.Image) -> bool:
    return picture.width * picture.height > _MAX_WHOLE_PIXELS


def _fill_up(data: bytes) -> bytes:
    """Insert the filler at the end of each part of a scan, and after the last a restart, for a part that is missing."""
    pieces, position, in_scan, num_restarts = [], 0, False, 0
    start = 0
    while (match := _MARKER.search(data, position)) is not None:
        marker, position = data[match.end() - 1], match.end()
        if in_scan:
            pieces += [data[start : match.start()], _FILLER]
            start = match.start()
            if marker not in _RESTARTS:
                pieces += [bytes([0xFF, _RESTARTS[num_restarts % len(_RESTARTS)]]), _FILLER]
        if marker == _END:
            break
        if marker not in _ALONE:
            position += int.from_bytes(data[position : position + 2])
        in_scan = marker == _SCAN or (in_scan and marker in _RESTARTS)
        num_restarts = num_restarts + 1 if in_scan and marker in _RESTARTS else 0
    return b"".join([*pieces, data[start:]])


def _decode(data: bytes) -> Image.Image:
    """Decode a file: a large one to a part of its size, for which the first of its coefficients are enough."""
    from PIL import Image

    picture = Image.open(io.BytesIO(data), formats=("JPEG",))
    if _is_large(picture):
        # The later scans of a progressive file have the later coefficients only.
        scale = 2 if "progressive" in picture.info else 8
        picture.draft(picture.mode, (picture.width // scale, picture.height // scale))
    picture.load()
    return picture
