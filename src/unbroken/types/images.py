"""Images inside token sequences, in the canonical form: the ids that the model sees.

A chat template writes one placeholder id per image; the model's processor expands it to one id per image feature. Our
sequences always hold the expanded ids, with a span for each image:

    written by the template    11 90 12          90 is the placeholder
    canonical                  11 90 90 90 12    ImageSpan(offset=1, length=3, placeholder_id=90, image=..., ...)

For engines that expect another form, it is converted from this one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unbroken.errors import InvalidInputError, InvariantError


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image file (PNG, JPEG, WebP, ...), identified everywhere by the SHA-256 of its bytes."""

    data: bytes = field(repr=False, compare=False)
    sha256: str = field(init=False)
    """64 lower-case hex digits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha256", hashlib.sha256(self.data).hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """The ids [offset, offset + length) of one image in a sequence, with the processor settings that made them."""

    offset: int
    length: int
    image: EncodedImage
    placeholder_id: int
    """The single id that the template wrote for the image."""
    settings: str = "{}"
    """Changes to the processor's defaults, such as `{"max_pixels":50176}`; made by `encode_image_settings`."""

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise InvariantError(f"an image span needs offset >= 0 and length >= 1, got {self.offset}, {self.length}")

    @property
    def stop(self) -> int:
        """One past the last id."""
        return self.offset + self.length

    @property
    def sha256(self) -> str:
        """The image's SHA-256."""
        return self.image.sha256


def find_misplaced_span(spans: Sequence[ImageSpan], num_ids: int, *, of: str) -> str | None:
    """Describe the first span that overlaps the previous one or exceeds the ids (named `of`); None if all are valid."""
    end = 0
    for k, span in enumerate(spans):
        if span.offset < end or span.stop > num_ids:
            return (
                f"images[{k}] must start after the previous image and end within the {num_ids} {of}, got "
                f"[{span.offset}, {span.stop}) after {end}"
            )
        end = span.stop
    return None


def encode_image_settings(settings: Mapping[str, Any] | None) -> str:
    """Encode processor settings as canonical JSON; raises `InvalidInputError` if they are not a JSON object."""
    try:
        return json.dumps(dict(settings or {}), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"mm_processor_kwargs must be a JSON object, got {settings!r}: {error}") from None
