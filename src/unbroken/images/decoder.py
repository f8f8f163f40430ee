"""Decode image files into RGB pictures, within limits that are checked before decoding."""

from __future__ import annotations

import io
import random
import re
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unbroken.errors import ImageError, install_command
from unbroken.types import EncodedImage

if TYPE_CHECKING:
    from PIL import Image


FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "PA", "CMYK", "I;16")
_ROWS_ON_WHITE = 256
_KEPT_BYTES, _PEAK_BYTES = 4, 16
"""Memory of a pixel in Pillow, and the most that decoding one takes (WebP), or an image processor."""
_DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    struct.error,
    zlib.error,
)
"""Exceptions that Pillow raises for broken files."""


class DecodingBudget:
    """Memory that images may take while they are decoded and processed, over all requests: others wait. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_used = 0
        self._next = threading.Lock()
        """Held by the first that waits: those behind it cannot overtake a large one."""
        self._changed = threading.Condition()

    @property
    def max_pixels(self) -> int:
        """How many pixels it has room for, once they are decoded."""
        return self._max_bytes // _KEPT_BYTES

    @contextmanager
    def reserve(self, sizes: Sequence[tuple[int, int]], *, name: str) -> Iterator[None]:
        """Wait for the memory of pictures of these sizes, all at a time; `ImageError` if there is never so much."""
        pixels = [width * height for width, height in sizes]
        needed = _KEPT_BYTES * sum(pixels) + (_PEAK_BYTES - _KEPT_BYTES) * max(pixels, default=0)
        if needed > self._max_bytes:
            raise ImageError(
                f"{name} must need at most {self._max_bytes} bytes to be decoded (image_memory_mib), got {needed} for "
                f"{sum(pixels)} pixels"
            )
        with self._next, self._changed:
            self._changed.wait_for(lambda: self._num_used + needed <= self._max_bytes)
            self._num_used += needed
        try:
            yield
        finally:
            with self._changed:
                self._num_used -= needed
                self._changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits on the size of one image, and on the memory of all that are decoded at a time."""

    max_bytes: int = 20 * 2**20
    """Maximum size of the file."""
    max_pixels: int = 64 * 2**20
    """Maximum of width times height, as given in the file's header."""
    budget: DecodingBudget | None = None
    """None for no limit."""

    @contextmanager
    def reserve(self, images: Mapping[str, EncodedImage]) -> Iterator[None]:
        """Hold the memory to decode images, all at a time, by their headers. The keys are their names in errors.

        Raises `ImageError` as `check_image`, and for images that the budget never has room for.
        """
        sizes = [check_image(image, self, name=name) for name, image in images.items()]
        with nullcontext() if self.budget is None else self.budget.reserve(sizes, name=", ".join([*images][:3])):
            yield


def check_image(image: EncodedImage, limits: ImageLimits, *, name: str = "image") -> tuple[int, int]:
    """Check the size and the header of an image, without decoding it; `name` is its name in errors.

    Returns:
        Width and height by the header; EXIF data may exchange them.

    Raises:
        ImageError: it is too large, not an image, animated, or of an unsupported format or mode.
    """
    return _open(image, limits, name).size


def decode_image(image: EncodedImage, limits: ImageLimits | None = None, *, name: str = "image") -> Image.Image:
    """Decode an image to RGB, rotated as its EXIF data says, transparent parts on white, 16 bits cut to the upper 8.

    Engines and trainer all use this function, so they see the same pixels. Metadata is dropped: a PNG of a few
    kilobytes may hold 64 MB of text.

    Raises:
        ImageError: as `check_image`; or the file is truncated or broken.
    """
    from PIL import ImageOps

    file = _open(image, limits or ImageLimits(), name)
    try:
        if file.format == "PNG":
            _check_png_rows(image.data)
        if file.format == "JPEG":
            _check_jpeg_data(file, image.data)
        ImageOps.exif_transpose(file, in_place=True)
        picture = _cut_to_8_bits(file) if file.mode == "I;16" else file
        if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
            picture = _put_on_white(picture)
        pixels = picture if picture.mode == "RGB" else picture.convert("RGB")
    except _DECODING_ERRORS as error:
        raise ImageError(f"{name} must be a whole {file.format} file, got one that does not decode: {error}") from None
    pixels.info = {}
    return pixels


def encode_picture(picture: Image.Image) -> EncodedImage:
    """Encode a picture as a PNG file, which is lossless."""
    file = io.BytesIO()
    picture.save(file, format="PNG", compress_level=1)
    return EncodedImage(file.getvalue())


def _open(image: EncodedImage, limits: ImageLimits, name: str) -> Image.Image:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImageError(
            f"images need Pillow, which cannot be imported ({error}): {install_command('vision')}"
        ) from None
    if len(image.data) > limits.max_bytes:
        raise ImageError(f"{name} must have at most {limits.max_bytes} bytes, got {len(image.data)}")
    try:
        file = Image.open(io.BytesIO(image.data))
    # The warning is raised where warnings are errors. It is not silenced here, because filters apply to all threads.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _bomb_error(error, limits, name) from None
    except (UnidentifiedImageError, *_DECODING_ERRORS) as error:
        raise ImageError(
            f"{name} must be an image file ({', '.join(FORMATS)}), got {len(image.data)} bytes: {error}"
        ) from None
    width, height = file.size
    if width * height > limits.max_pixels:
        raise ImageError(f"{name} must have at most {limits.max_pixels} pixels, got {width} x {height}")
    if file.format not in FORMATS:
        raise ImageError(f"{name} must be one of {', '.join(FORMATS)}, got {file.format}")
    if file.mode not in MODES:
        raise ImageError(f"{name} must have one of the modes {', '.join(MODES)}, got {file.mode}")
    if _is_animated(file, name):
        raise ImageError(f"{name} must be one picture, got an animated {file.format}")
    return file


def _bomb_error(error: Exception, limits: ImageLimits, name: str) -> ImageError:
    """The error for a picture above Pillow's limit, which may be lower than ours. Its size is only in the message."""
    num_pixels, pillows = map(int, re.findall(r"(\d+) pixels", str(error)))
    if num_pixels > limits.max_pixels:
        return ImageError(f"{name} must have at most {limits.max_pixels} pixels, got {num_pixels}")
    return ImageError(f"{name} must have at most {pillows} pixels (PIL.Image.MAX_IMAGE_PIXELS), got {num_pixels}")


def _put_on_white(picture: Image.Image) -> Image.Image:
    """Put a picture on white, some rows at a time: the steps in between need four times the memory of the result."""
    from PIL import Image

    found = Image.new("RGB", picture.size)
    for top in range(0, picture.height, _ROWS_ON_WHITE):
        rows = picture.crop((0, top, picture.width, min(top + _ROWS_ON_WHITE, picture.height))).convert("RGBA")
        white = Image.new("RGBA", rows.size, "white")
        found.paste(Image.alpha_composite(white, rows).convert("RGB"), (0, top))
    return found


def _cut_to_8_bits(picture: Image.Image) -> Image.Image:
    """Take the upper 8 bits of grey values, as Pillow itself does with 16-bit colours. Its `convert` would clip."""
    from PIL import Image

    values = np.asarray(picture)
    grey = (values >> 8).astype(np.uint8)
    transparent = picture.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return Image.fromarray(grey)


def _is_animated(file: Image.Image, name: str) -> bool:
    """Whether there is a second frame. Counting all frames would take seconds for a file with a million of them."""
    try:
        return bool(getattr(file, "is_animated", False))
    except _DECODING_ERRORS as error:
        raise ImageError(
            f"{name} must be one whole picture, got a {file.format} that is broken after the first frame: {error}"
        ) from None


_JPEG_SCAN, _JPEG_END = 0xDA, 0xD9
_JPEG_RESTARTS = range(0xD0, 0xD8)
_JPEG_ALONE = frozenset({0x01, 0xD8, *_JPEG_RESTARTS})
"""Markers without a length."""
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff]")
_JPEG_FILLER = bytes(random.Random(0).choices(range(255), k=1024))
"""Bytes without a marker, and not from a picture."""
_MAX_WHOLE_PIXELS = 2**20


def _check_jpeg_data(picture: Image.Image, data: bytes) -> None:
    """Raise `ValueError` if a scan of a JPEG file ends before its last row. `picture` is the file, opened.

    Decoders fill up what a scan lacks with grey, and only warn.

    A decoder ignores bytes between the end of a scan and the next marker, unless data are missing: then it takes them
    for the data. So a file that lacks nothing is the same picture with and without such bytes.
    """
    from PIL import ImageChops

    found = _decode_jpeg(data) if _is_large(picture) else picture
    found.load()
    filled = _decode_jpeg(_fill_up_jpeg(data))
    missing = ImageChops.difference(found, filled).getbbox(alpha_only=False)
    if missing is not None:
        raise ValueError(f"its data end {missing[1] / found.height:.0%} from the top")


def _is_large(picture: Image.Image) -> bool:
    return picture.width * picture.height > _MAX_WHOLE_PIXELS


def _fill_up_jpeg(data: bytes) -> bytes:
    """Insert the filler at the end of each part of a scan, and after the last a restart, for a part that is missing."""
    pieces, position, in_scan, num_restarts = [], 0, False, 0
    start = 0
    while (match := _JPEG_MARKER.search(data, position)) is not None:
        marker, position = data[match.end() - 1], match.end()
        if in_scan:
            pieces += [data[start : match.start()], _JPEG_FILLER]
            start = match.start()
            if marker not in _JPEG_RESTARTS:
                pieces += [bytes([0xFF, _JPEG_RESTARTS[num_restarts % len(_JPEG_RESTARTS)]]), _JPEG_FILLER]
        if marker == _JPEG_END:
            break
        if marker not in _JPEG_ALONE:
            position += int.from_bytes(data[position : position + 2])
        in_scan = marker == _JPEG_SCAN or (in_scan and marker in _JPEG_RESTARTS)
        num_restarts = num_restarts + 1 if in_scan and marker in _JPEG_RESTARTS else 0
    return b"".join([*pieces, data[start:]])


def _decode_jpeg(data: bytes) -> Image.Image:
    """Decode a file: a large one to a part of its size, for which the first of its coefficients are enough."""
    from PIL import Image

    picture = Image.open(io.BytesIO(data), formats=("JPEG",))
    if _is_large(picture):
        # The later scans of a progressive file have the later coefficients only.
        scale = 2 if "progressive" in picture.info else 8
        picture.draft(picture.mode, (picture.width // scale, picture.height // scale))
    picture.load()
    return picture


_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""By colour type."""
_PNG_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column, first row, and the steps between columns and rows of each pass of an interlaced file."""
_CHUNK_BYTES = 2**20


def _check_png_rows(data: bytes) -> None:
    """Raise `ValueError` if the data of a PNG file, whose header is valid, end before its last row.

    Pillow leaves those rows black that a file's data end before.
    """
    width, height, bits, colour, _, _, interlace = struct.unpack_from(">IIBBBBB", data, 16)
    expected = _count_png_bytes(width, height, bits * _PNG_CHANNELS[colour], interlaced=bool(interlace))
    decoder = zlib.decompressobj()
    found = 0
    for piece in _find_png_data(data):
        while piece and found < expected and not decoder.eof:
            found += len(decoder.decompress(piece, _CHUNK_BYTES))
            piece = decoder.unconsumed_tail
    if found < expected:
        raise ValueError(f"it has {found} of {expected} bytes of pixels")


def _count_png_bytes(width: int, height: int, bits: int, *, interlaced: bool) -> int:
    """Count the bytes of all rows, each with its filter byte, at `bits` for a pixel."""
    passes = _PNG_PASSES if interlaced else ((0, 0, 1, 1),)
    sizes = [(-((x - width) // dx), -((y - height) // dy)) for x, y, dx, dy in passes]
    return sum(rows * (1 + (columns * bits + 7) // 8) for columns, rows in sizes if columns > 0 and rows > 0)


def _find_png_data(data: bytes) -> Iterator[bytes]:
    """Yield the content of the file's IDAT chunks."""
    position = 8
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"IDAT":
            yield data[position + 8 : position + 8 + length]
        position += 12 + length
