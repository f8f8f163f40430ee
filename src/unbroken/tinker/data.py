"""What the server and the models say to each other.

Position i of a datum's input predicts one target, or K of them; inputs of a loss have the targets' shape:

    input_ids  [5 6 7]    the model sees        targets  [6 7 8]     weights  [0 1 1]
    targets    [[6 9] [7 9] [8 9]]              two for each position, weights [[.5 .5] [.5 .5] [.5 .5]]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from unbroken.types import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence of T ids, and what a loss needs of it."""

    input_ids: TokenIds
    """[T] int32."""
    targets: NDArray[np.int64] | None
    """[T] or [T, K] ids of the vocabulary, whose logprobs are asked for; None: missing, which every loss refuses."""
    inputs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """By the API's names: `weights`, `logprobs`, `advantages`, ...; finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The answer to one `forward_backward`: of each datum the logprobs of its targets, in their shape, and metrics that
    are named as the SDK adds up those of several chunks, `NAME:sum` or `NAME:max`.
    """

    logprobs: Sequence[NDArray[np.float32]]
    metrics: Mapping[str, float]
