"""What a request may tell the model's image processor: how large an image is made, and nothing that costs more.

A processor takes many more arguments (patch sizes, crops, normalisation). Those are the model's: some would make
gigabytes of a small image, or pixels that the model was never trained on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unbroken.errors import ImageError
from unbroken.server.http.errors import shorten

_AREAS = frozenset({"min_pixels", "max_pixels"})
_AREAS_OR_EDGES = frozenset({"shortest_edge", "longest_edge"})
_SIZE_KEYS = _AREAS_OR_EDGES | {"height", "width", "max_height", "max_width"}
_FIELD = "mm_processor_kwargs"


def check_settings(given: Mapping[str, Any], *, known: frozenset[str], max_pixels: int) -> None:
    """Check a request's `mm_processor_kwargs`.

    Args:
        given: what it has.
        known: what the processor takes, of which `min_pixels`, `max_pixels` and `size` may be given.
        max_pixels: as many pixels as an image may have.

    Raises:
        ImageError: another name, or a size that is no whole number or asks for more pixels.
    """
    allowed = known & (_AREAS | {"size"})
    if unknown := sorted(set(given) - allowed):
        raise ImageError(f"{_FIELD} must be some of {sorted(allowed)}, got {shorten(unknown)}")
    for name in _AREAS & set(given):
        _check_number(f"{_FIELD}.{name}", given[name], max_pixels)
    size = given.get("size")
    if size is None:
        return
    if not isinstance(size, Mapping) or not set(size) <= _SIZE_KEYS:
        raise ImageError(f"{_FIELD}.size must be an object with some of {sorted(_SIZE_KEYS)}, got {shorten(size)}")
    # Processors that know an image by its area have areas here, under the names of edges.
    areas = _AREAS_OR_EDGES if known >= _AREAS else frozenset[str]()
    for key, value in size.items():
        _check_number(f"{_FIELD}.size.{key}", value, max_pixels if key in areas else math.isqrt(max_pixels))


def _check_number(name: str, value: Any, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ImageError(f"{name} must be a whole number in [1, {most}], got {shorten(value)}")
