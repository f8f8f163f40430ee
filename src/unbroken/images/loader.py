"""Load the images of messages and requests from any of the supported forms."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from unbroken.errors import ImageError, InvalidInputError, UnknownImageError
from unbroken.images.decoder import ImageLimits, check_image, encode_picture
from unbroken.messages import IMAGE_TYPES, get_image_source
from unbroken.types import EncodedImage
from unbroken.untrusted import read_file

_REFERENCE = "sha256:"
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLoader:
    """Loads an image from a PIL image, bytes, base64, a data URL, a file or a reference, and checks it.

    A server sets `files` to False: a path in a request would name one of the server's files.
    """

    limits: ImageLimits = field(default_factory=ImageLimits)
    files: bool = True
    """Whether local files may be read."""
    find_stored: Callable[[str], EncodedImage | None] | None = None
    """Finds an image by its SHA-256, for references such as `sha256:9f86...`; None refuses references."""
    fetch: Callable[[str], bytes] | None = None
    """Downloads an http(s) URL, or raises `ImageError`; None refuses URLs."""

    def load(self, source: Any, *, name: str = "image") -> EncodedImage:
        """Load an image; `name` is its name in errors.

        Raises:
            ImageError: the source has no supported form, or the image is broken or exceeds the limits.
        """
        image = self._read(source, name)
        check_image(image, self.limits, name=name)
        return image

    def load_part(self, part: Mapping[str, Any], *, name: str) -> EncodedImage:
        """Load the image of an image part; raises `ImageError` as `load` does, or if the part has no image."""
        source = get_image_source(part)
        if source is None:
            raise ImageError(f"{name} must have its image under {part['type']!r}, got {sorted(map(str, part))}")
        return self.load(source, name=name)

    def _read(self, source: Any, name: str) -> EncodedImage:
        if isinstance(source, EncodedImage):
            return source
        if isinstance(source, (bytes, bytearray, memoryview)):
            return EncodedImage(bytes(source))
        if isinstance(source, Path):
            return self._read_file(source, name)
        if isinstance(source, str):
            return self._read_text(source, name)
        if hasattr(source, "save") and hasattr(source, "getbands"):
            return _encode_picture(source, name)
        raise ImageError(
            f"{name} must be a PIL image, bytes, base64, a data URL, a file or a reference, got {type(source).__name__}"
        )

    def _read_text(self, source: str, name: str) -> EncodedImage:
        if source.startswith(_REFERENCE):
            return self._find(source.removeprefix(_REFERENCE), name)
        if source.startswith(("http://", "https://")):
            if self.fetch is None:
                raise ImageError(f"{name} must not be a URL to fetch, got {source[:80]!r}: send the image itself")
            try:
                return EncodedImage(self.fetch(source))
            except ImageError as error:
                raise ImageError(f"{name}: {error}") from error
        if source.startswith("data:"):
            match = _DATA_URL.match(source)
            if match is None:
                raise ImageError(f"{name} must be a data URL data:image/TYPE;base64,..., got {source[:40]!r}")
            return self._decode(source[match.end() :], name)
        if source.startswith("file://"):
            return self._read_file(_find_path(source), name)
        if self.files and len(source) < 4096 and os.path.isfile(source):  # noqa: PTH113  Path.is_file may raise
            return self._read_file(Path(source), name)
        return self._decode(source, name)

    def _decode(self, text: str, name: str) -> EncodedImage:
        if len(text) > self.limits.max_bytes * 4 // 3 + 4:
            raise ImageError(f"{name} must have at most {self.limits.max_bytes} bytes, got {len(text) * 3 // 4}")
        try:
            return EncodedImage(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as error:
            or_file = " or an existing file" if self.files else ""
            raise ImageError(f"{name} must be base64{or_file}, got {text[:40]!r}: {error}") from None

    def _read_file(self, path: Path, name: str) -> EncodedImage:
        if not self.files:
            raise ImageError(f"{name} must not be a file, got {str(path)!r}: send the image itself")
        try:
            return EncodedImage(read_file(path, max_bytes=self.limits.max_bytes))
        except InvalidInputError as error:
            raise ImageError(f"{name}: {error}") from None
        except (OSError, ValueError) as error:  # ValueError: the path has no encoding
            raise ImageError(f"{name} must be a file that can be read, got {str(path)!r}: {error}") from None

    def _find(self, sha256: str, name: str) -> EncodedImage:
        image = None
        if self.find_stored is not None and re.fullmatch("[0-9a-f]{64}", sha256):
            image = self.find_stored(sha256)
        if image is None:
            raise UnknownImageError(sha256, name=name)
        return image


def _find_path(url: str) -> Path:
    """The path of a file URL, in which a space is `%20`."""
    return Path(unquote(url.removeprefix("file://").removeprefix("localhost")))


def _encode_picture(picture: Any, name: str) -> EncodedImage:
    """Encode a PIL image, whose mode may not exist in PNG and whose file may be broken."""
    try:
        return encode_picture(picture)
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageError(
            f"{name} must be a picture that can be written as PNG, got one of mode "
            f"{getattr(picture, 'mode', 'unknown')}: {error}"
        ) from None


def find_image_parts(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Find the image parts of messages, in order, each with its place, such as `messages[2].content[0]`.

    Malformed parts are skipped, for `check_messages` to refuse.
    """
    return [
        (f"messages[{position}].content[{number}]", part)
        for position, message in enumerate(messages)
        if isinstance(content := message.get("content"), list)
        for number, part in enumerate(content)
        if isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES
    ]
