"""Decode image files into RGB pictures, within limits that are checked before decoding."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unbroken.errors import ImageError
from unbroken.types import EncodedImage

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "PA")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits on the size of one image."""

    max_bytes: int = 20 * 2**20
    """Maximum size of the file."""
    max_pixels: int = 64 * 2**20
    """Maximum of width times height, as given in the file's header."""


def check_image(image: EncodedImage, limits: ImageLimits, *, name: str = "image") -> None:
    """Check the size and the header of an image, without decoding it; `name` is its name in errors.

    Raises:
        ImageError: it is too large, not an image, animated, or of an unsupported format or mode.
    """
    _open(image, limits, name)


def decode_image(image: EncodedImage, limits: ImageLimits | None = None, *, name: str = "image") -> Image.Image:
    """Decode an image to RGB, rotated as its EXIF data says, transparent parts on white.

    Engines and trainer all use this function, so they see the same pixels. Metadata is dropped: a PNG of a few
    kilobytes may hold 64 MB of text.

    Raises:
        ImageError: as `check_image`; or the file is truncated or broken.
    """
    from PIL import Image, ImageOps

    file = _open(image, limits or ImageLimits(), name)
    try:
        picture = ImageOps.exif_transpose(file)
        if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            white = Image.new("RGBA", picture.size, "white")
            picture = Image.alpha_composite(white, picture)
        pixels = picture.convert("RGB")
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
            f"images need Pillow, which cannot be imported ({error}): pip install 'unbroken[vision]'"
        ) from None
    if len(image.data) > limits.max_bytes:
        raise ImageError(f"{name} must have at most {limits.max_bytes} bytes, got {len(image.data)}")
    try:
        file = Image.open(io.BytesIO(image.data))
    # The warning is raised where warnings are errors. It is not silenced here, because filters apply to all threads.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"{name} must have at most {limits.max_pixels} pixels, got more: {error}") from None
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


def _is_animated(file: Image.Image, name: str) -> bool:
    """Whether there is a second frame. Counting all frames would take seconds for a file with a million of them."""
    try:
        return bool(getattr(file, "is_animated", False))
    except _DECODING_ERRORS as error:
        raise ImageError(
            f"{name} must be one whole picture, got a {file.format} that is broken after the first frame: {error}"
        ) from None
