"""Checks of rewards and advantages, which must be finite in float32, the type of the rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from unbroken.errors import InvalidInputError

MAX_FLOAT32 = float(np.finfo(np.float32).max)


def to_finite_float32(value: Any, *, name: str, error: type[InvalidInputError] = InvalidInputError) -> float:
    """Convert a Python or numpy number to a float; raises `error` unless it is finite in float32."""
    if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        shape = getattr(value, "shape", None)
        received = repr(value) if shape is None else f"shape {tuple(shape)}"
        raise error(f"{name} must be one number, got {received} ({type(value).__name__})")
    try:
        number = float(value)
        text = str(value)
    except OverflowError:  # Python may also refuse to convert such an integer to text
        number = math.inf
        text = f"an integer of {int(value).bit_length()} bits"
    if not abs(number) <= MAX_FLOAT32:
        raise error(f"{name} must be finite in float32, got {text}: check the function that computes it")
    return number
