"""Images inside token sequences."""

from __future__ import annotations

import re
from dataclasses import dataclass

from unbroken.errors import InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """Where one image's placeholder ids stand in a token sequence, and which image it is."""

    offset: int
    """Index of the first placeholder id."""
    length: int
    """Number of placeholder ids, after expansion."""
    sha256: str
    """Hex digest of the image's encoded bytes: the identity that both engine and trainer check."""

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise InvariantError(f"an image span needs offset >= 0 and length >= 1, got {self.offset}, {self.length}")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise InvariantError(f"sha256 must be 64 lower-case hex digits, got {self.sha256!r}")
