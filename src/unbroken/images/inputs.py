"""`ImageInputs`: how a renderer or a server handles images."""

from __future__ import annotations

from dataclasses import dataclass, field

from unbroken.images.loading import ImageLoader
from unbroken.images.processing import ImageProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInputs:
    """How images are loaded and processed, for a model that takes images."""

    processor: ImageProcessor
    loader: ImageLoader = field(default_factory=ImageLoader)
    settings: str = "{}"
    """Processor settings where a request has none, as in `ImageSpan`."""
