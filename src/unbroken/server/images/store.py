"""Images that clients sent, kept so that later requests can name them as `sha256:...`."""

from __future__ import annotations

from unbroken.images.lru_cache import LruCache
from unbroken.types import EncodedImage


class ImageStore:
    """Image files by SHA-256, up to a total of bytes; the least recently used are dropped. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._images: LruCache[str, EncodedImage] = LruCache(max_bytes, lambda image: len(image.data))

    def put(self, image: EncodedImage) -> None:
        """Keep an image, unless it alone is larger than the limit."""
        self._images.put(image.sha256, image)

    def get(self, sha256: str) -> EncodedImage | None:
        """The image with this hash, if it is still kept."""
        return self._images.get(sha256)

    @property
    def num_bytes(self) -> int:
        """Total size of the files."""
        return self._images.size
