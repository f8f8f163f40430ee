"""Configs of what is minimised: clips, corrections, distances, and rewards of truncated rows (docs/algorithms.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from unbroken.errors import InvalidInputError


class LossNormalization(StrEnum):
    """The divisor of the sum over an update's loss tokens."""

    TOKEN = "token"
    """The number of loss tokens of all trajectories (DAPO, arXiv:2503.14476)."""
    SEQUENCE = "sequence"
    """Each trajectory's own number of loss tokens, then the number of trajectories (GRPO, arXiv:2402.03300)."""
    CONSTANT = "constant"
    """The number of trajectories times `max_trajectory_tokens` (Dr. GRPO, arXiv:2503.20783)."""


class CorrectionKind(StrEnum):
    """The weight that a token gets by its ratio of trainer and sampler."""

    NONE = "none"
    """Every weight is 1."""
    TOKEN_TRUNCATE = "token_truncate"
    """The token's ratio, at most the upper bound."""
    TOKEN_MASK = "token_mask"
    """The token's ratio if it is within the bounds, else 0."""
    SEQUENCE_TRUNCATE = "sequence_truncate"
    """The product of the trajectory's ratios, at most the upper bound; the same for all its tokens."""
    SEQUENCE_MASK = "sequence_mask"
    """The product of the trajectory's ratios if it is within the bounds, else 0; the same for all its tokens."""
    TIS = "tis"
    """Truncated importance sampling: token_truncate at 2."""
    MIS = "mis"
    """Masked importance sampling: sequence_mask from 0 to 2."""
    ICEPOP = "icepop"
    """token_mask from 0.5 to 5 (IcePop, arXiv:2510.18855)."""


_NAMED = {
    CorrectionKind.TIS: (CorrectionKind.TOKEN_TRUNCATE, 0.0, 2.0),
    CorrectionKind.MIS: (CorrectionKind.SEQUENCE_MASK, 0.0, 2.0),
    CorrectionKind.ICEPOP: (CorrectionKind.TOKEN_MASK, 0.5, 5.0),
}
"""What a name stands for: a kind and its usual bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The correction for the gap between sampler and trainer, and its bounds."""

    elsewhere: ClassVar[Mapping[str, str]] = {"low": "it is that of the kind: 0.5 of icepop, 0 of the others"}
    """Fields that are no settings of a run, and why."""

    kind: CorrectionKind = CorrectionKind.NONE
    low: float | None = None
    """Smallest ratio that is not masked; none: that of the name, otherwise 0."""
    high: float | None = None
    """Largest ratio that is not masked or truncated; none: that of the name, otherwise 2."""

    def __post_init__(self) -> None:
        if not 0 <= self.bounds[0] < 1 < self.bounds[1]:
            raise InvalidInputError(
                f"Correction needs 0 <= low < 1 < high, got low={self.bounds[0]}, high={self.bounds[1]}"
            )

    @property
    def effect(self) -> CorrectionKind:
        """The kind that a name stands for; other kinds stand for themselves."""
        return _NAMED[self.kind][0] if self.kind in _NAMED else self.kind

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest ratio, whether given or usual."""
        _, low, high = _NAMED.get(self.kind, (self.kind, 0.0, 2.0))
        return low if self.low is None else self.low, high if self.high is None else self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig:
    """How far the ratio of policy and old policy may go. Each loss has its own values for what is not given, and
    refuses what it does not use.
    """

    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("positive_temperature", "negative_temperature"), "sapo has those of its paper"
    )
    """Fields that are no settings of a run, and why."""

    low: float | None = None
    """A ratio below 1 - low has no gradient if the advantage is negative."""
    high: float | None = None
    """A ratio above 1 + high has no gradient if the advantage is positive. Larger than `low`, so that unlikely tokens
    can become likely (clip-higher, DAPO, arXiv:2503.14476)."""
    dual: float | None = None
    """A ratio above this has no gradient if the advantage is negative (dual clip, arXiv:1912.09729), e.g. 3; none: no
    such bound."""
    positive_temperature: float | None = None
    """For sapo: how fast the weight of a token falls with its ratio's distance from 1, if the advantage is positive."""
    negative_temperature: float | None = None
    """For sapo: the same if the advantage is negative or 0."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            low=(self.low is None or 0 < self.low < 1, "in (0, 1)"),
            high=(self.high is None or is_positive(self.high), "finite and > 0"),
            dual=(self.dual is None or (math.isfinite(self.dual) and self.dual > 1), "finite and > 1"),
            positive_temperature=(_is_positive_or_none(self.positive_temperature), "finite and > 0"),
            negative_temperature=(_is_positive_or_none(self.negative_temperature), "finite and > 0"),
        )
        if self.dual is not None and self.high is not None and self.dual <= 1 + self.high:
            raise InvalidInputError(
                f"ClipConfig.dual must be above 1 + high, where positive advantages are clipped, got {self.dual!r} "
                f"with high={self.high}"
            )


class KlEstimator(StrEnum):
    """An estimate of KL(policy || reference) from a sampled id, by d = logprob - reference logprob."""

    K1 = "k1"
    """d. In the loss its gradient has the mean 0, so it pulls nowhere: it is for the reward."""
    K2 = "k2"
    """d^2 / 2. In the loss its gradient is that of the KL, for ids that the policy samples."""
    K3 = "k3"
    """exp(-d) - 1 + d, never negative (GRPO, arXiv:2402.03300)."""
    K3_RATIO_WEIGHTED = "k3_ratio_weighted"
    """k3 times the ratio of policy and old policy, with the ratio's gradient (DeepSeek-V3.2, arXiv:2512.02556; TRL's
    use_bias_correction_kl). Only in the loss."""


class KlPlace(StrEnum):
    """Where the distance to the reference counts."""

    LOSS = "loss"
    """In each token's loss."""
    REWARD = "reward"
    """In the rewards, before advantages are computed: a trajectory's sum over its ids is subtracted, with the old
    policy's logprobs and without gradient (arXiv:1909.08593)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlConfig:
    """How the distance to the reference is measured and where it counts; its weight is `TrainerConfig.kl_weight`."""

    estimator: KlEstimator = KlEstimator.K3
    place: KlPlace = KlPlace.LOSS

    def __post_init__(self) -> None:
        check_fields(
            self,
            estimator=(isinstance(self.estimator, KlEstimator), "a KlEstimator"),
            place=(isinstance(self.place, KlPlace), "a KlPlace"),
        )
        if self.place is KlPlace.REWARD and self.estimator is KlEstimator.K3_RATIO_WEIGHTED:
            raise InvalidInputError(
                f"KlConfig.estimator must be k1, k2 or k3 in the reward, which has no gradient to correct, got "
                f"{self.estimator.value}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSync:
    """A reference that follows the policy (TR-DPO, arXiv:2404.09656): its weights become mixup * policy +
    (1 - mixup) * reference.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {"mixup": "it is 0.6, as in the paper; every says how fast it follows"}
    """Fields that are no settings of a run, and why."""

    every: int
    """Steps from one time to the next. Lower it where the distance holds back a policy that still learns."""
    mixup: float = 0.6

    def __post_init__(self) -> None:
        check_fields(self, every=(self.every >= 1, ">= 1"), mixup=(0 < self.mixup <= 1, "in (0, 1]"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyControl:
    """Adaptive entropy control (Skywork-OR1, arXiv:2505.22312). After each update the weight of the entropy rises by
    `delta` if the mean entropy at its loss tokens was at most `target`, and otherwise falls by it. The bonus is in the
    loss only while the last update's entropy was at most the target; the first update has none.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {
        "delta": "it is 0.005, as in the paper",
        "min_weight": "it is 0: below, the loss would lower the entropy",
        "max_weight": "it is 1, where a nat of entropy weighs as much as an advantage of 1",
    }
    """Fields that are no settings of a run, and why."""

    target: float
    """In nats. That of a healthy run is in `train/entropy`."""
    delta: float = 0.005
    min_weight: float = 0.0
    max_weight: float = 1.0

    def __post_init__(self) -> None:
        check_fields(
            self,
            target=(is_positive(self.target), "finite and > 0"),
            delta=(is_positive(self.delta), "finite and > 0"),
            min_weight=(0 <= self.min_weight <= self.max_weight, f"in [0, max_weight], which is {self.max_weight}"),
            max_weight=(is_positive(self.max_weight), "finite and > 0"),
        )

    def adapt(self, weight: float, entropy: float) -> float:
        """The weight after an update with this entropy."""
        changed = weight + (self.delta if entropy <= self.target else -self.delta)
        return min(max(changed, self.min_weight), self.max_weight)


class TruncatedRows(StrEnum):
    """What becomes of trajectories that a length limit cut (`truncated` and `max_tokens`)."""

    TRAIN = "train"
    """They are trained on like others."""
    MASK = "mask"
    """Their rewards count for their siblings, but they are not trained on (overlong filtering, DAPO,
    arXiv:2503.14476)."""


class ZeroVarianceRows(StrEnum):
    """What becomes of trajectories without an advantage: of groups whose rewards are all equal, and unscored ones."""

    COUNT = "count"
    """They count in the divisor of the loss, as in the papers, and its other terms (distance, entropy) train them."""
    DROP = "drop"
    """They are left out with their share of the divisor, as are trajectories that `TruncatedRows.MASK` leaves out: if
    half of a step's groups teach nothing, the gradient of the other half is twice as large."""


class FailedRows(StrEnum):
    """What becomes of trajectories that failed (`failed`), for no fault of the policy, beside siblings that did not."""

    DROP = "drop"
    """They are left out: siblings are compared as if the failed one had not been sampled."""
    BASELINE = "baseline"
    """They count for their siblings, with `TrainerConfig.failed_reward`, but are not trained on. A baseline without
    them is that of the lucky ones, higher than what the policy gets."""
    TRAIN = "train"
    """They count, and what they sampled is trained on: where agents themselves cause their failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongConfig:
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13): what is subtracted from a trajectory's reward
    rises linearly over the last `buffer` ids before `max_tokens`, from 0 to `penalty`.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {"penalty": "it is 1, as in the paper; weights of rewards are beside it"}
    """Fields that are no settings of a run, and why."""

    max_tokens: int
    """Sampled ids of a trajectory, in all turns, from which on the whole penalty is subtracted."""
    buffer: int
    """Over how many ids the penalty rises; a fifth of `max_tokens` in the paper."""
    penalty: float = 1.0

    def __post_init__(self) -> None:
        check_fields(
            self,
            max_tokens=(self.max_tokens >= 1, ">= 1"),
            buffer=(1 <= self.buffer <= self.max_tokens, f"in [1, max_tokens], which is {self.max_tokens}"),
            penalty=(is_positive(self.penalty), "finite and > 0"),
        )

    def punish(self, num_tokens: int) -> float:
        """What a trajectory of `num_tokens` sampled ids loses. Worked example, max_tokens 100 and buffer 20: 80 ids
        lose nothing, 90 half of the penalty, 100 and more all of it.
        """
        over = num_tokens - (self.max_tokens - self.buffer)
        return self.penalty * min(max(over / self.buffer, 0.0), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig:
    """Settings of `OnlineDpo`, whose loss is `online_dpo.dpo_loss`."""

    beta: float = 0.1
    """Scale of a pair's margin: the smaller, the further the policy may go from the reference."""

    def __post_init__(self) -> None:
        check_fields(self, beta=(is_positive(self.beta), "finite and > 0"))


def is_positive(value: float) -> bool:
    """Whether a number is finite and above 0."""
    return math.isfinite(value) and value > 0


def _is_positive_or_none(value: float | None) -> bool:
    return value is None or is_positive(value)


def check_fields(config: Any, **rules: tuple[bool, str]) -> None:
    """Raise `InvalidInputError` with the first field whose rule does not hold, the rule, and the field's value."""
    for name, (holds, rule) in rules.items():
        if not holds:
            raise InvalidInputError(f"{type(config).__name__}.{name} must be {rule}, got {getattr(config, name)!r}")
