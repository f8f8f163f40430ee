"""Images for tests that only need one to be itself."""

from __future__ import annotations

from unbroken.types import EncodedImage, ImageSpan

PLACEHOLDER = 7


def image_span(*, offset: int, length: int, image: str = "cat") -> ImageSpan:
    """A span of the image of that name; the file is no real one."""
    return ImageSpan(offset=offset, length=length, image=EncodedImage(image.encode()), placeholder_id=PLACEHOLDER)
