"""An image's file to the picture that every model sees, within limits that are checked before anything is decoded."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unbroken.errors import ImageError
from unbroken.types import EncodedImage

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "PA")


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
    """The picture: RGB, turned as its EXIF data says, transparent parts over white.

    Every engine and the trainer are given this picture, so none of them has a say in how a file is read.

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
        return picture.convert("RGB")
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise ImageError(
            f"{name} must be a whole {opened.format} file, got one that does not decode: {error}"
        ) from None


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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(image.data))
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name} must have at most {limits.max_pixels} pixels, got more: {error}") from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
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
    num_frames = getattr(opened, "n_frames", 1)
    if num_frames != 1:
        raise ImageError(f"{name} must be one picture, got {num_frames} frames")
    return opened
