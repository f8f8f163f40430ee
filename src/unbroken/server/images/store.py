"""The images a server knows by name: sent once, then referred to as `sha256:...` wherever an image may stand."""

from __future__ import annotations

from unbroken.images.lru_cache import LruCache
from unbroken.types import EncodedImage


class ImageStore:
    """Files of images by their SHA-256, within a number of bytes: those that were not used for longest are forgotten.

    What an image takes beside its file is not counted. Safe to use from several threads.
    """

    def __init__(self, max_bytes: int) -> None:
        self._images: LruCache[str, EncodedImage] = LruCache(max_bytes, lambda image: len(image.data))

    def put(self, image: EncodedImage) -> None:
        """Keep an image; one that is larger than all the room is not kept."""
        self._images.put(image.sha256, image)

    def get(self, sha256: str) -> EncodedImage | None:
        """The image of that name, if it is still here."""
        return self._images.get(sha256)

    @property
    def num_bytes(self) -> int:
        """Of all the files together."""
        return self._images.size
