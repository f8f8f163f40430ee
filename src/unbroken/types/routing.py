"""Routed experts: which experts of a mixture-of-experts model computed each id, so that a trainer takes the same.

An array is [R, L, K]: R ids, L layers (all of the model's, with zeros for layers without experts) and K experts of an
id in a layer, uint8 for at most 256 experts and uint16 for more. Experts belong to an id as the *input* of the model,
so the id that was sampled last has none. A prompt 1 2 3 and a completion 4 5:

    ids        1 2 3 4 5
    experts    a b c d        R = 4: those of 1 2 3 decided the distribution of 4, and with d that of 5
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import InvariantError
from unbroken.types.arrays import freeze

RoutedExperts: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""[R, L, K] the experts of each id in each layer."""
_DTYPES = (np.dtype(np.uint8), np.dtype(np.uint16))


def routed_experts(values: NDArray[Any], *, num_experts: int | None = None) -> RoutedExperts:
    """Return `values` as a read-only array.

    Raises:
        InvariantError: it is not [R, L, K] with L and K of at least 1, not uint8 or uint16, or has an expert that a
            model of `num_experts` has not.
    """
    array = np.asarray(values)
    if array.dtype.newbyteorder("=") not in _DTYPES:
        raise InvariantError(f"routed_experts must be uint8 or uint16, got dtype {array.dtype}")
    if array.ndim != 3 or 0 in array.shape[1:]:
        raise InvariantError(f"routed_experts must have the shape [ids, layers, experts per id], got {array.shape}")
    if num_experts is not None and array.size and array.max() >= num_experts:
        raise InvariantError(f"routed_experts must lie in [0, {num_experts}), got {array.max()}")
    experts: RoutedExperts = freeze(array.astype(array.dtype.newbyteorder("="), copy=False))
    return experts


def write_experts(experts: RoutedExperts | None) -> str | None:
    """Write experts as vLLM's servers do: the bytes of an `.npy` file in base64."""
    if experts is None:
        return None
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


def read_experts(text: str | None) -> RoutedExperts | None:
    """Read what `write_experts` or a server of vLLM wrote. Raises `InvariantError` for anything else."""
    if text is None:
        return None
    try:
        values = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (TypeError, ValueError, EOFError, binascii.Error) as error:
        raise InvariantError(f"routed_experts must be an .npy file in base64: {error}") from None
    return routed_experts(values)


def get_expert_dtype(num_experts: int) -> np.dtype[Any]:
    """The smallest dtype that holds the experts of a model."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)
