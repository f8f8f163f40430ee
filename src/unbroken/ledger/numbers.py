"""Rewards and advantages come from outside, and end up in float32 rows: one number each, finite in float32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from unbroken.errors import InvalidInputError

MAX_FLOAT32 = float(np.finfo(np.float32).max)


def to_finite_float32(value: Any, *, name: str, error: type[InvalidInputError] = InvalidInputError) -> float:
    """Return `value`, a Python or numpy number, as a float that float32 can hold.

    Raises:
        InvalidInputError: (or the `error` given) it is no number, NaN, infinite or too large; names `name` and value.
    """
    if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        shape = getattr(value, "shape", None)
        what = repr(value) if shape is None else f"shape {tuple(shape)}"
        raise error(f"{name} must be one number, got {what} ({type(value).__name__})")
    try:
        number = float(value)
        shown = str(value)
    except OverflowError:  # Python may refuse to write out such an integer, too
        number = math.inf
        shown = f"an integer of {int(value).bit_length()} bits"
    if not abs(number) <= MAX_FLOAT32:
        raise error(f"{name} must be finite in float32, got {shown}: check what computes it")
    return number
