"""What the server and the models say to each other: data, inputs of losses, optimizer steps. It knows no wire.

Position i of a datum's input predicts one target, or K of them; inputs of a loss have the targets' shape:

    input_ids  [5 6 7]    the model sees        targets  [6 7 8]     weights  [0 1 1]
    targets    [[6 9] [7 9] [8 9]]              two for each position, weights [[.5 .5] [.5 .5] [.5 .5]]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import InvalidInputError
from unbroken.types import TokenIds

MAX_RANK = 512


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
class LoraSpec:
    """The adapter of one model."""

    rank: int
    seed: int | None = None
    """Decides the first weights of the adapter; None: any."""
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MAX_RANK:
            raise InvalidInputError(f"lora_config.rank must be in [1, {MAX_RANK}], got {self.rank}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise InvalidInputError(f"lora_config.seed must be in [0, 2^63), got {self.seed}")
        if not (self.train_mlp or self.train_attn or self.train_unembed):
            raise InvalidInputError("lora_config must train mlp, attn or unembed, got False for all three")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """One step of Adam; weight decay is decoupled (AdamW)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """The largest norm of all gradients together; 0: they are not clipped."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            if not 0 <= value <= 1e12:  # more overflows within a step
                raise InvalidInputError(f"adam_params.{name} must lie in [0, 1e12], got {value}")
        for name in ("beta1", "beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise InvalidInputError(f"adam_params.{name} must be in [0, 1), got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The answer to one `forward_backward`: of each datum the logprobs of its targets, in their shape, and metrics that
    are named as the SDK adds up those of several chunks, `NAME:sum` or `NAME:max`.
    """

    logprobs: Sequence[NDArray[np.float32]]
    metrics: Mapping[str, float]
