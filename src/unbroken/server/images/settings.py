"""Checks a request's settings for the image processor: only the size of images, within the server's limit.

A processor's other arguments (patch sizes, crops, normalisation) belong to the model: some would turn a small image
into gigabytes, or into pixels that the model was never trained on.
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


def check_settings(given: Mapping[str, Any], *, known: frozenset[str], max_pixels: int, name: str) -> None:
    """Check `mm_processor_kwargs`: of the processor's `known` arguments, `min_pixels`, `max_pixels` and `size`.

    `name` is the field's name in errors.

    Raises `ImageError` for any other name, and for a size that is not a whole number or asks for too many pixels.
    """
    allowed = known & (_AREAS | {"size"})
    if unknown := sorted(set(given) - allowed):
        raise ImageError(f"{name} must be some of {sorted(allowed)}, got {shorten(unknown)}")
    for area in _AREAS & set(given):
        _check_number(f"{name}.{area}", given[area], max_pixels)
    size = given.get("size")
    if size is None:
        return
    if not isinstance(size, Mapping) or not set(size) <= _SIZE_KEYS:
        raise ImageError(f"{name}.size must be an object with some of {sorted(_SIZE_KEYS)}, got {shorten(size)}")
    # Processors with min_pixels and max_pixels expect areas in `size`, under the names of edges.
    areas = _AREAS_OR_EDGES if known >= _AREAS else frozenset[str]()
    for key, value in size.items():
        _check_number(f"{name}.size.{key}", value, max_pixels if key in areas else math.isqrt(max_pixels))


def _check_number(name: str, value: Any, maximum: int) -> None:
    if type(value) is not int or not 1 <= value <= maximum:
        raise ImageError(f"{name} must be a whole number in [1, {maximum}], got {shorten(value)}")
