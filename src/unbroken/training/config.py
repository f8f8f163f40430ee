"""What the trainer and the loop can be told: one small frozen config per component, checked when it is built."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from unbroken.errors import InvalidInputError


class OldLogprobs(StrEnum):
    """Which policy the update's ratio is taken against."""

    SAMPLER = "sampler"
    """`rollout_logprobs`: the ratio corrects for stale weights and for any mismatch between sampler and trainer."""
    RECOMPUTE = "recompute"
    """The trainer's own logprobs before the step: one more forward pass, and the ratio starts at 1 whatever sampled."""


class Reference(StrEnum):
    """A reference policy that needs no model of its own."""

    BASE = "base"
    """The model below its LoRA adapter, which the adapter's first version equals."""


class Packing(StrEnum):
    """Whether rows of a forward pass share its lanes (`lanes.Layout`), which saves the padding behind short ones."""

    AUTO = "auto"
    """In lanes about as long as a row, where the model is proven to keep rows apart; others are padded, and so are all
    rows of a trainer that takes images. `train/padding_share` shows what is left of padding."""
    ONE_LANE = "one_lane"
    """All rows of a pass in one lane, without any padding, whatever attention over it costs; refused without proof."""
    NEVER = "never"
    """Every row is padded."""


class LossNormalization(StrEnum):
    """What the sum over an update's loss tokens is divided by."""

    TOKEN = "token"
    """The number of loss tokens of all rows (DAPO, arXiv:2503.14476)."""
    SEQUENCE = "sequence"
    """Each row's own number of loss tokens, then the number of rows (GRPO, arXiv:2402.03300)."""
    CONSTANT = "constant"
    """The number of rows times the most loss tokens a row may have (Dr. GRPO, arXiv:2503.20783)."""


class CorrectionKind(StrEnum):
    """What becomes of a ratio beyond its bounds."""

    NONE = "none"
    """Every weight is 1."""
    TOKEN_TRUNCATE = "token_truncate"
    """A token's ratio, at most the upper bound (TIS)."""
    TOKEN_MASK = "token_mask"
    """A token's ratio inside the bounds, else 0 (IcePop, MIS)."""
    SEQUENCE_MASK = "sequence_mask"
    """The product of a row's ratios inside the bounds, for all its tokens, else 0 for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Which correction, and its bounds."""

    kind: CorrectionKind = CorrectionKind.NONE
    low: float = 0.0
    """Least ratio that a mask lets pass."""
    high: float = 2.0
    """Greatest ratio, and where truncation stops."""

    def __post_init__(self) -> None:
        if not 0 <= self.low < 1 < self.high:
            raise InvalidInputError(f"Correction needs 0 <= low < 1 < high, got low={self.low}, high={self.high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig:
    """How far the ratio may move before a token stops pulling: [1 - low, 1 + high]."""

    low: float = 0.2
    high: float = 0.28
    """Wider than `low`, so that unlikely tokens can still grow (clip-higher, DAPO, arXiv:2503.14476)."""

    def __post_init__(self) -> None:
        _check(self, low=(0 < self.low < 1, "in (0, 1)"), high=(_positive(self.high), "finite and > 0"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig:
    """The loss on preference pairs (`preferences.dpo_loss`)."""

    beta: float = 0.1
    """How strongly a pair's margin counts: the smaller, the further the policy goes from the reference."""

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
    """Gradients are scaled down to this L2 norm over all parameters; inf leaves them alone."""
    warmup_updates: int = 0
    """The learning rate rises linearly over the first updates and reaches its full value at this one."""

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
        """The learning rate of the update that follows `num_updates` others."""
        if num_updates >= self.warmup_updates:
            return self.learning_rate
        return self.learning_rate * (num_updates + 1) / self.warmup_updates


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """How one step trains on its rows."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
    old_logprobs: OldLogprobs = OldLogprobs.SAMPLER
    normalization: LossNormalization = LossNormalization.TOKEN
    max_row_tokens: int | None = None
    """Most loss tokens a row may have; CONSTANT divides by it, the others do not use it."""
    correction: Correction = field(default_factory=Correction)
    """For the gap between sampler and trainer, with `OldLogprobs.RECOMPUTE`."""
    kl_weight: float = 0.0
    """Weight of the distance to the reference policy in the loss; 0 computes no reference."""
    dpo: DpoConfig | None = None
    """Train on preference pairs, by this loss over policy and reference; None: on rows with advantages, by the clipped
    policy loss, which `clip`, `normalization`, `correction` and `kl_weight` belong to."""
    num_minibatches: int = 1
    """Optimizer updates per step; the rows are dealt out at random, each to one of them (a pair's stay together)."""
    tokens_per_micro_batch: int = 16_384
    """Most ids, padding included, in one forward pass; a longer row makes a pass of its own and is never cut."""
    packing: Packing = Packing.AUTO
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping its activations: a third more time."""
    logprob_chunk_size: int = 1_024
    """Tokens whose logits exist at the same time."""
    image_cache_bytes: int = 2**30
    """Most bytes of images' inputs kept in memory during a step; beyond that an image is processed again."""
    seed: int = 0
    """Decides which row goes into which minibatch."""

    def __post_init__(self) -> None:
        _check(
            self,
            old_logprobs=(isinstance(self.old_logprobs, OldLogprobs), "an OldLogprobs"),
            normalization=(isinstance(self.normalization, LossNormalization), "a LossNormalization"),
            max_row_tokens=(
                (self.max_row_tokens is not None and self.max_row_tokens >= 1)
                if self._is_constant()
                else self.max_row_tokens is None,
                ">= 1 with LossNormalization.CONSTANT, which divides by it, and None with the others",
            ),
            correction=(
                self.correction.kind is CorrectionKind.NONE or self.old_logprobs is OldLogprobs.RECOMPUTE,
                "CorrectionKind.NONE with OldLogprobs.SAMPLER, whose ratio is the correction already",
            ),
            kl_weight=(math.isfinite(self.kl_weight) and self.kl_weight >= 0, "finite and >= 0"),
            dpo=(self.dpo is None or self._has_no_policy_loss(), "None with a kl_weight, normalization or correction"),
            num_minibatches=(self.num_minibatches >= 1, ">= 1"),
            tokens_per_micro_batch=(self.tokens_per_micro_batch >= 1, ">= 1"),
            packing=(isinstance(self.packing, Packing), "a Packing"),
            logprob_chunk_size=(self.logprob_chunk_size >= 1, ">= 1"),
            image_cache_bytes=(self.image_cache_bytes >= 0, ">= 0"),
            seed=(self.seed >= 0, ">= 0"),
        )

    def _has_no_policy_loss(self) -> bool:
        untouched = self.kl_weight == 0 and self.correction.kind is CorrectionKind.NONE
        return untouched and self.normalization is LossNormalization.TOKEN

    @property
    def has_reference(self) -> bool:
        """Whether logprobs are compared with those of a reference."""
        return self.kl_weight > 0 or self.dpo is not None

    def _is_constant(self) -> bool:
        return self.normalization is LossNormalization.CONSTANT


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageConfig:
    """What to put up with from engines that go away."""

    wait_s: float = 1800.0
    """Longest wait for them to come back, each time."""
    ask_every_s: float = 2.0
    """Pause between two looks whether they are back."""
    max_losses: int = 5
    """How often one step may lose its rollouts: a prompt that ends its engine would do so each time."""

    def __post_init__(self) -> None:
        _check(
            self,
            wait_s=(self.wait_s >= 0, ">= 0"),
            ask_every_s=(_positive(self.ask_every_s), "finite and > 0"),
            max_losses=(self.max_losses >= 1, ">= 1"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """How long to train, and on what."""

    num_steps: int
    max_lag: int = 0
    """Most policy versions between the weights that sampled an id and the trainer's. Rollouts with older ids are lost:
    they come from an engine that was started again and has its first weights."""
    outages: OutageConfig = field(default_factory=OutageConfig)
    num_unvaried_scored: int = 8
    """Trajectories that teach nothing, because their group's rewards are all equal, whose mismatch each process
    measures in a step: a forward pass over them. 0 leaves it out, and `mismatch/kl` empty where there are any."""

    def __post_init__(self) -> None:
        _check(
            self,
            num_steps=(self.num_steps >= 1, ">= 1"),
            max_lag=(self.max_lag >= 0, ">= 0"),
            num_unvaried_scored=(self.num_unvaried_scored >= 0, ">= 0"),
        )


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _check(config: Any, **rules: tuple[bool, str]) -> None:
    for name, (holds, rule) in rules.items():
        if not holds:
            raise InvalidInputError(f"{type(config).__name__}.{name} must be {rule}, got {getattr(config, name)!r}")
