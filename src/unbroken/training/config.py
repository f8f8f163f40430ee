"""Configs of the trainer and the loop: small and frozen, one per component, checked when they are built."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from unbroken.errors import InvalidInputError


class OldLogprobs(StrEnum):
    """The policy in the divisor of the update's ratio."""

    SAMPLER = "sampler"
    """`rollout_logprobs`: the ratio corrects for stale weights and for any mismatch between sampler and trainer."""
    RECOMPUTE = "recompute"
    """The trainer's own logprobs before the step, at the cost of one more forward pass; the ratio starts at 1."""


class Reference(StrEnum):
    """A reference policy that needs no second model."""

    BASE = "base"
    """The model without its LoRA adapters, which is the policy before training."""


class Packing(StrEnum):
    """Whether several rows share a lane of a forward pass (`lanes.Layout`), which saves padding."""

    AUTO = "auto"
    """Lanes are about as long as the longest row, if the model is proven to keep rows apart; otherwise, and always with
    images, each row is padded. `train/padding_share` is the share of padding that remains."""
    ONE_LANE = "one_lane"
    """All rows of a pass in one lane without any padding, whatever attention then costs; an error if the model is not
    proven to keep rows apart."""
    NEVER = "never"
    """Every row is padded."""


class LossNormalization(StrEnum):
    """The divisor of the sum over an update's loss tokens."""

    TOKEN = "token"
    """The number of loss tokens of all rows (DAPO, arXiv:2503.14476)."""
    SEQUENCE = "sequence"
    """Each trajectory's own number of loss tokens, then the number of trajectories (GRPO, arXiv:2402.03300)."""
    CONSTANT = "constant"
    """The number of trajectories times `max_trajectory_tokens` (Dr. GRPO, arXiv:2503.20783)."""


class CorrectionKind(StrEnum):
    """The weight that a token gets by its ratio of trainer and sampler."""

    NONE = "none"
    """Every weight is 1."""
    TOKEN_TRUNCATE = "token_truncate"
    """The token's ratio, at most the upper bound (TIS)."""
    TOKEN_MASK = "token_mask"
    """The token's ratio if it is within the bounds, else 0 (IcePop, MIS)."""
    SEQUENCE_MASK = "sequence_mask"
    """The product of the row's ratios if it is within the bounds, else 0; the same for all its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The correction for the gap between sampler and trainer, and its bounds."""

    kind: CorrectionKind = CorrectionKind.NONE
    low: float = 0.0
    """Smallest ratio that is not masked."""
    high: float = 2.0
    """Largest ratio that is not masked or truncated."""

    def __post_init__(self) -> None:
        if not 0 <= self.low < 1 < self.high:
            raise InvalidInputError(f"Correction needs 0 <= low < 1 < high, got low={self.low}, high={self.high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig:
    """Bounds of the ratio, [1 - low, 1 + high], beyond which a token has no gradient."""

    low: float = 0.2
    high: float = 0.28
    """Larger than `low`, so that unlikely tokens can become likely (clip-higher, DAPO, arXiv:2503.14476)."""

    def __post_init__(self) -> None:
        _check(self, low=(0 < self.low < 1, "in (0, 1)"), high=(_positive(self.high), "finite and > 0"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig:
    """Settings of `OnlineDpo`, whose loss is `online_dpo.dpo_loss`."""

    beta: float = 0.1
    """Scale of a pair's margin: the smaller, the further the policy may go from the reference."""

    def __post_init__(self) -> None:
        _check(self, beta=(_positive(self.beta), "finite and > 0"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW."""

    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this L2 norm over all parameters; inf does not scale."""
    warmup_updates: int = 0
    """The learning rate rises linearly and reaches its full value at the update of this number."""

    def __post_init__(self) -> None:
        _check(
            self,
            learning_rate=(_positive(self.learning_rate), "finite and > 0"),
            weight_decay=(math.isfinite(self.weight_decay) and self.weight_decay >= 0, "finite and >= 0"),
            betas=(all(0 <= beta < 1 for beta in self.betas), "in [0, 1), both"),
            eps=(_positive(self.eps), "finite and > 0"),
            max_grad_norm=(self.max_grad_norm > 0, "> 0"),
            warmup_updates=(self.warmup_updates >= 0, ">= 0"),
        )

    def learning_rate_at(self, num_updates: int) -> float:
        """The learning rate of the next update after `num_updates` updates."""
        if num_updates >= self.warmup_updates:
            return self.learning_rate
        return self.learning_rate * (num_updates + 1) / self.warmup_updates


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """How one step trains. `clip`, `normalization`, `correction` and `kl_weight` are for `PolicyGradient`."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
    old_logprobs: OldLogprobs = OldLogprobs.SAMPLER
    normalization: LossNormalization = LossNormalization.TOKEN
    max_trajectory_tokens: int | None = None
    """Maximum loss tokens of a trajectory, all of its rows together, by which CONSTANT divides; the other
    normalizations do not use it."""
    correction: Correction = field(default_factory=Correction)
    """For the gap between sampler and trainer; only with `OldLogprobs.RECOMPUTE`."""
    kl_weight: float = 0.0
    """Weight of the distance to the reference policy in the loss; 0 uses no reference. Above 0, groups whose rewards
    are all equal, and trajectories without a score, are trained on too, by this term alone."""
    dpo: DpoConfig | None = None
    """For `OnlineDpo`; None: the defaults of `DpoConfig`."""
    num_minibatches: int = 1
    """Optimizer updates per step; each row, or pair, goes into one of them at random."""
    tokens_per_micro_batch: int = 16_384
    """Maximum ids in one forward pass, padding included; a longer row is not cut and has a pass of its own."""
    packing: Packing = Packing.AUTO
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping its activations: a third more time."""
    logprob_chunk_size: int = 1_024
    """Tokens whose logits are in memory at the same time."""
    image_cache_bytes: int = 2**30
    """Maximum bytes of processed images kept in memory during a step; other images are processed again."""
    seed: int = 0
    """Seed of the random order in which rows are dealt out to minibatches."""

    def __post_init__(self) -> None:
        _check(
            self,
            old_logprobs=(isinstance(self.old_logprobs, OldLogprobs), "an OldLogprobs"),
            normalization=(isinstance(self.normalization, LossNormalization), "a LossNormalization"),
            max_trajectory_tokens=(
                (self.max_trajectory_tokens is not None and self.max_trajectory_tokens >= 1)
                if self._is_constant()
                else self.max_trajectory_tokens is None,
                ">= 1 with LossNormalization.CONSTANT, which divides by it, and None with the others",
            ),
            correction=(
                self.correction.kind is CorrectionKind.NONE or self.old_logprobs is OldLogprobs.RECOMPUTE,
                "CorrectionKind.NONE with OldLogprobs.SAMPLER, whose ratio is the correction already",
            ),
            kl_weight=(math.isfinite(self.kl_weight) and self.kl_weight >= 0, "finite and >= 0"),
            num_minibatches=(self.num_minibatches >= 1, ">= 1"),
            tokens_per_micro_batch=(self.tokens_per_micro_batch >= 1, ">= 1"),
            packing=(isinstance(self.packing, Packing), "a Packing"),
            logprob_chunk_size=(self.logprob_chunk_size >= 1, ">= 1"),
            image_cache_bytes=(self.image_cache_bytes >= 0, ">= 0"),
            seed=(self.seed >= 0, ">= 0"),
        )

    def _is_constant(self) -> bool:
        return self.normalization is LossNormalization.CONSTANT


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageConfig:
    """How long and how often a run waits for engines that go away."""

    wait_s: float = 1800.0
    """Maximum wait for them to come back, each time."""
    ask_every_s: float = 2.0
    """Pause between two checks of their health."""
    max_losses: int = 5
    """How often one step may lose its rollouts; a prompt that crashes the engine would do so each time."""

    def __post_init__(self) -> None:
        _check(
            self,
            wait_s=(self.wait_s >= 0, ">= 0"),
            ask_every_s=(_positive(self.ask_every_s), "finite and > 0"),
            max_losses=(self.max_losses >= 1, ">= 1"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """How long to train, and which rollouts are recent enough."""

    num_steps: int
    max_lag: int = 0
    """Maximum policy versions between the weights that sampled an id and the trainer's. Rollouts with older ids are
    sampled again: they come from an engine that was restarted and has its first weights."""
    outages: OutageConfig = field(default_factory=OutageConfig)
    num_zero_variance_scored: int = 8
    """Trajectories per step and process, of groups whose rewards are all equal, that are scored to measure their
    mismatch although they are not trained on. With 0, `mismatch/kl` is empty in steps that have such groups."""

    def __post_init__(self) -> None:
        _check(
            self,
            num_steps=(self.num_steps >= 1, ">= 1"),
            max_lag=(self.max_lag >= 0, ">= 0"),
            num_zero_variance_scored=(self.num_zero_variance_scored >= 0, ">= 0"),
        )


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _check(config: Any, **rules: tuple[bool, str]) -> None:
    for name, (holds, rule) in rules.items():
        if not holds:
            raise InvalidInputError(f"{type(config).__name__}.{name} must be {rule}, got {getattr(config, name)!r}")
