"""What a renderer or a server needs to take images."""

from __future__ import annotations

from dataclasses import dataclass, field

from unbroken.images.loading import ImageLoader
from unbroken.images.processing import ImageProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInputs:
    """How images come in, and what becomes of them. A text model has none."""

    processor: ImageProcessor
    loader: ImageLoader = field(default_factory=ImageLoader)
    settings: str = "{}"
    """What the processor is told where nobody says otherwise, as in `ImageSpan`."""
