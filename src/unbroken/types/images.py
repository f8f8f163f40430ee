"""Images inside token sequences: the canonical form, in which a trajectory holds what the model consumed.

A chat template writes one placeholder id per image; the model's processor makes of it as many ids as the image has
features. Here ids are always expanded, and a span says which of them are which image:

    written by the template    11 90 12          90 is the placeholder
    canonical                  11 90 90 90 12    ImageSpan(offset=1, length=3, placeholder_id=90, image=..., ...)

Each engine is given the form it wants, made from this one.
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
    """An image's file (PNG, JPEG, WebP, ...), and the name it is known by everywhere: the SHA-256 of its bytes."""

    data: bytes = field(repr=False, compare=False)
    sha256: str = field(init=False)
    """64 lower-case hex digits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha256", hashlib.sha256(self.data).hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """Where one image's ids stand in a token sequence, and what made them: image and processor settings."""

    offset: int
    """Index of the first of its ids."""
    length: int
    """Number of its ids, after expansion."""
    image: EncodedImage
    placeholder_id: int
    """The one id that the template wrote for the image."""
    settings: str = "{}"
    """Changes to the processor's defaults, such as `{"max_pixels":50176}`; made by `encode_image_settings`."""

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise InvariantError(f"an image span needs offset >= 0 and length >= 1, got {self.offset}, {self.length}")

    @property
    def stop(self) -> int:
        """One behind the last of its ids."""
        return self.offset + self.length

    @property
    def sha256(self) -> str:
        """The image's name."""
        return self.image.sha256


def find_misplaced_span(spans: Sequence[ImageSpan], num_ids: int, *, of: str) -> str | None:
    """Which of the spans overlaps the one before it or leaves the `num_ids` ids, told for an error; None if none does.

    `of` is what the ids are called.
    """
    end = 0
    for k, span in enumerate(spans):
        if span.offset < end or span.stop > num_ids:
            return (
                f"images[{k}] must stand behind the one before it and inside the {num_ids} {of}, got "
                f"[{span.offset}, {span.stop}) after {end}"
            )
        end = span.stop
    return None


def encode_image_settings(settings: Mapping[str, Any] | None) -> str:
    """Processor settings as canonical JSON: equal settings are equal texts.

    Raises:
        InvalidInputError: they are no JSON object.
    """
    try:
        return json.dumps(dict(settings or {}), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"mm_processor_kwargs must be a JSON object, got {settings!r}: {error}") from None
