"""Arrays of ids, logprobs and flags, and checks of single values."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import InvalidInputError

TokenIds: TypeAlias = NDArray[np.int32]
"""Token ids in order, int32."""
Logprobs: TypeAlias = NDArray[np.float32]
"""Natural-log probabilities, float32."""
BoolMask: TypeAlias = NDArray[np.bool_]
"""One flag per token."""


_LARGEST_ID = 2**31 - 1
_NO_IDS: TokenIds = np.zeros(0, dtype=np.int32)
_NO_IDS.flags.writeable = False
MAX_DEPTH = 128
"""Most levels of JSON from outside. Python's limit is about 1,000 calls, and a schema of 1,000 levels takes minutes."""


def token_ids(values: Iterable[int] | NDArray[Any], *, name: str = "token_ids") -> TokenIds:
    """Return `values` as a read-only int32 array, [T]; raises `InvalidInputError` unless they are ids in [0, 2**31)."""
    try:
        array = np.asarray(values if isinstance(values, (np.ndarray, Sequence)) else list(values))
    except (ValueError, TypeError) as error:  # lists of several lengths, or no list at all
        raise InvalidInputError(
            f"{name} must be a list of whole numbers, got {reprlib.repr(values)}: {error}"
        ) from None
    if array.size == 0:
        return _NO_IDS
    if array.ndim != 1:
        raise InvalidInputError(f"{name} must be one-dimensional, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise InvalidInputError(f"{name} must be whole numbers, got dtype {array.dtype}")
    is_int32 = array.dtype == np.int32
    if np.minimum.reduce(array) < 0 or (not is_int32 and array.max() > _LARGEST_ID):
        raise InvalidInputError(f"{name} must lie in [0, 2**31), got {array.min()} to {array.max()}")
    if is_int32:
        ids: TokenIds = freeze(array)
        return ids
    ids = array.astype(np.int32)  # a copy, which nobody else has
    ids.flags.writeable = False
    return ids


def freeze(array: NDArray[Any]) -> Any:
    """Return `array` if its memory is read-only, else a read-only copy: recorded facts are never edited."""
    owner: Any = array if array.base is None else array.base
    if array.flags.writeable or not isinstance(owner, np.ndarray) or owner.flags.writeable or not owner.flags.owndata:
        array = array.copy()
        array.flags.writeable = False
    return array


def count_common_prefix(left: Sequence[Any] | NDArray[Any], right: Sequence[Any] | NDArray[Any]) -> int:
    """Count the equal items at the start of two arrays, or of two sequences."""
    num_common = min(len(left), len(right))
    if not isinstance(left, np.ndarray):
        return next((k for k in range(num_common) if left[k] != right[k]), num_common)
    differs = np.flatnonzero(left[:num_common] != right[:num_common])
    return int(differs[0]) if differs.size else num_common


def is_whole(value: Any, low: int, high: int = 2**31 - 1) -> bool:
    """Whether `value` is an integer in [low, high], and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(low <= value <= high)


def is_real(value: Any, low: float, high: float) -> bool:
    """Whether `value` is a number in [low, high], and neither a bool nor NaN."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return is_number and bool(low <= value <= high)


def is_text(value: Any) -> bool:
    """Whether `value` is a non-empty string."""
    return isinstance(value, str) and value != ""


_NESTING = frozenset({dict, list})


def is_deep(value: Any) -> bool:
    """Whether lists and dicts are nested in more than `MAX_DEPTH` levels."""
    level, depth = [value] if type(value) in _NESTING else [], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        # The types of a million ids are compared in C.
        children = (one.values() if type(one) is dict else one for one in level)
        nested = (values for values in children if not _NESTING.isdisjoint(map(type, values)))
        level = [one for values in nested for one in values if type(one) in _NESTING]
    return depth > MAX_DEPTH
