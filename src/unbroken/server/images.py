"""The images a server knows by name: sent once, then referred to as `sha256:...` wherever an image may stand."""

from __future__ import annotations

import threading
from collections import OrderedDict

from unbroken.types import EncodedImage


class ImageStore:
    """Files of images by their SHA-256, within a number of bytes: those that were not used for longest are forgotten.

    What an image takes beside its file is not counted. Safe to use from several threads.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[str, EncodedImage] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def put(self, image: EncodedImage) -> None:
        """Keep an image; one that is larger than all the room is not kept."""
        with self._lock:
            if image.sha256 in self._images:
                self._images.move_to_end(image.sha256)
                return
            if len(image.data) > self._max_bytes:
                return
            self._images[image.sha256] = image
            self._num_bytes += len(image.data)
            while self._num_bytes > self._max_bytes:
                _, oldest = self._images.popitem(last=False)
                self._num_bytes -= len(oldest.data)

    def get(self, sha256: str) -> EncodedImage | None:
        """The image of that name, if it is still here."""
        with self._lock:
            if sha256 in self._images:
                self._images.move_to_end(sha256)
            return self._images.get(sha256)

    @property
    def num_bytes(self) -> int:
        """Of all the files together."""
        return self._num_bytes
