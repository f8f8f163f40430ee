"""An image's file to the picture that every model sees, within limits that are checked before anything is decoded."""

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
_BROKEN = (
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
"""What Pillow raises for files that are broken in one place or another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What one image may take."""

    max_bytes: int = 20 * 2**20
    """Of the file."""
    max_pixels: int = 64 * 2**20
    """Width times height, as the file's header has them."""


def check_image(image: EncodedImage, limits: ImageLimits, *, name: str = "image") -> None:
    """Check an image by its size and its header, without decoding it.

    Raises:
        ImageError: it is too large, no image, or of a format or mode that is not taken; `name` says which it is.
    """
    _open(image, limits, name)


def decode_image(image: EncodedImage, limits: ImageLimits | None = None, *, name: str = "image") -> Image.Image:
    """The picture: RGB, turned as its EXIF data says, transparent parts over white; its pixels and nothing else.

    Every engine and the trainer are given this picture, so none of them has a say in how a file is read. A PNG of a few
    kilobytes may hold 64 MB of text, which must not stay with a picture that is kept.

    Raises:
        ImageError: as `check_image`, or the file is cut short or broken.
    """
    from PIL import Image, ImageOps

    opened = _open(image, limits or ImageLimits(), name)
    try:
        picture = ImageOps.exif_transpose(opened)
        if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            white = Image.new("RGBA", picture.size, "white")
            picture = Image.alpha_composite(white, picture)
        pixels = picture.convert("RGB")
    except _BROKEN as error:
        raise ImageError(
            f"{name} must be a whole {opened.format} file, got one that does not decode: {error}"
        ) from None
    pixels.info = {}
    return pixels


def encode_picture(picture: Image.Image) -> EncodedImage:
    """A picture in memory as a PNG file, which loses nothing."""
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
        opened = Image.open(io.BytesIO(image.data))
    # A warning is raised where warnings are errors. It is not silenced: filters are of all threads.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"{name} must have at most {limits.max_pixels} pixels, got more: {error}") from None
    except (UnidentifiedImageError, *_BROKEN) as error:
        raise ImageError(
            f"{name} must be an image file ({', '.join(FORMATS)}), got {len(image.data)} bytes: {error}"
        ) from None
    width, height = opened.size
    if width * height > limits.max_pixels:
        raise ImageError(f"{name} must have at most {limits.max_pixels} pixels, got {width} x {height}")
    if opened.format not in FORMATS:
        raise ImageError(f"{name} must be one of {', '.join(FORMATS)}, got {opened.format}")
    if opened.mode not in MODES:
        raise ImageError(f"{name} must have one of the modes {', '.join(MODES)}, got {opened.mode}")
    if _is_animated(opened, name):
        raise ImageError(f"{name} must be one picture, got an animated {opened.format}")
    return opened


def _is_animated(opened: Image.Image, name: str) -> bool:
    """Whether there is a second frame: to count all of them takes seconds for a file that has a million."""
    try:
        return bool(getattr(opened, "is_animated", False))
    except _BROKEN as error:
        raise ImageError(
            f"{name} must be one whole picture, got a {opened.format} that is broken behind the first: {error}"
        ) from None
