"""Losses of the policy gradient, by name, and the factors and penalties of their tokens.

To add a loss, write its function here and give it a name in `LOSSES`.

A loss reads the logprobs of the N loss tokens of one forward pass (N may be 0), and of the batch the old logprobs and
the advantages. With r = exp(logprob - old logprob), the advantage A, sg = without gradient, and s = exp of the mean of
log r over the trajectory:

    clipped      -min(r A, clip(r, 1 - low, 1 + high) A)
    gspo         -min(s A, clip(s, 1 - low, 1 + high) A)
    gspo_token   the same with s' = sg(s) r / sg(r), for advantages that differ within a trajectory
    cispo        -sg(clip(r, 1 - low, 1 + high)) A logprob
    sapo         -sigmoid(t (r - 1)) 4 / t A, with a temperature t for each sign of A
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from unbroken.errors import InvalidInputError
from unbroken.training.config import OldLogprobs
from unbroken.training.loss_config import ClipConfig, Correction, CorrectionKind, KlEstimator, LossNormalization
from unbroken.training.model.batch import Batch, TrajectorySums


class TokenLosses(NamedTuple):
    """The loss of each token, before it is weighted."""

    losses_N: torch.Tensor
    """With the gradient of the logprobs."""
    clipped_N: torch.Tensor
    """bool, the tokens whose ratio was clipped, for `train/clip_fraction`."""


PolicyLossFn: TypeAlias = Callable[[torch.Tensor, Batch, ClipConfig], TokenLosses]
"""From the current logprobs [N] of a batch's loss tokens to their losses. All rows of the batch are whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss function with the clip that suits it. A plain function is taken for one with the clip of PPO."""

    function: PolicyLossFn
    clip: ClipConfig = field(default_factory=lambda: ClipConfig(low=0.2, high=0.28))
    """The values of the fields that are not given."""
    stale_clip: ClipConfig | None = None
    """The same in a run with `loop.max_staleness`, around the sampler's logprobs; None: around the trainer's own, with
    the correction tis."""
    uses: tuple[str, ...] = ("low", "high", "dual")
    """The fields of `ClipConfig` that it reads; others are refused."""
    old_logprobs: OldLogprobs = OldLogprobs.SAMPLER
    """Unless the config has others."""
    is_joint: bool = False
    """Whether it reads `mean_log_ratio`. If trajectories forked, this costs one more forward pass of each row."""
    is_uniform: bool = False
    """Whether all tokens of a trajectory must have one advantage."""

    @property
    def name(self) -> str:
        """For error messages."""
        return getattr(self.function, "__name__", str(self.function))

    def complete(self, given: ClipConfig) -> ClipConfig:
        """The clip with this loss's own values where none are given; `InvalidInputError` for one that it ignores."""
        values = {each.name: getattr(given, each.name) for each in fields(given)}
        for name, value in values.items():
            if value is not None and name not in self.uses:
                raise InvalidInputError(
                    f"TrainerConfig.clip.{name} must be left out with the loss {self.name}, which does "
                    f"not use it, got {value!r}: it uses {', '.join(self.uses) or 'no clip'}"
                )
        return replace(self.clip, **{name: value for name, value in values.items() if value is not None})

    def __call__(self, logprobs_N: torch.Tensor, batch: Batch, clip: ClipConfig) -> TokenLosses:
        """The losses of a batch; `InvalidInputError` for another shape, which torch would spread over all tokens."""
        losses: Any = self.function(logprobs_N, batch, self.complete(clip))  # the function may be the user's
        found = losses if isinstance(losses, tuple) and len(losses) == 2 else (losses,)
        shapes = [tuple(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__ for each in found]
        if shapes != [tuple(logprobs_N.shape)] * 2:
            raise InvalidInputError(
                f"the loss {self.name} must return TokenLosses(losses_N, clipped_N), one of each for every token: "
                f"shapes {[tuple(logprobs_N.shape)] * 2} for {len(logprobs_N)} tokens, got {shapes}"
            )
        return TokenLosses(*found)


def clipped(logprobs_N: torch.Tensor, batch: Batch, clip: ClipConfig) -> TokenLosses:
    """PPO's -min(r A, clip(r) A) with r = exp(logprob - old logprob) (arXiv:1707.06347).

    With `clip.dual` c, negative advantages count at most as min(c A, ...) (dual clip, arXiv:1912.09729).
    """
    ratio_N = (logprobs_N - batch.old_logprobs_N).exp()
    return _clip(ratio_N, batch.advantages_N, clip)


def gspo(logprobs_N: torch.Tensor, batch: Batch, clip: ClipConfig) -> TokenLosses:
    """GSPO's -min(s A, clip(s) A) with one ratio s for a trajectory: the geometric mean of its tokens' ratios
    (arXiv:2507.18071, equation 5).

    Each token has the value of its trajectory and its own part of the gradient, s A / length times that of its logprob:
    their sum, at equal weights, is GSPO's (equation 10). So the rows of a trajectory may lie in different passes.
    """
    return gspo_token(logprobs_N, batch, clip)


def gspo_token(logprobs_N: torch.Tensor, batch: Batch, clip: ClipConfig) -> TokenLosses:
    """GSPO-token (arXiv:2507.18071, equation 13): as `gspo`, for advantages that differ within a trajectory."""
    shared_N = mean_log_ratio(logprobs_N, batch).to(logprobs_N.dtype)
    ratio_N = (shared_N + logprobs_N - logprobs_N.detach()).exp()
    return _clip(ratio_N, batch.advantages_N, clip)


def cispo(logprobs_N: torch.Tensor, batch: Batch, clip: ClipConfig) -> TokenLosses:
    """CISPO's -sg(clip(r)) A logprob (arXiv:2506.13585, equation 4): the ratio is clipped, but no token loses its
    gradient. Without `clip.low` there is no lower bound, as in the paper; high 4 is a bound of 5 (arXiv:2510.13786).
    """
    assert clip.high is not None
    ratio_N = (logprobs_N.detach() - batch.old_logprobs_N).exp()
    bounded_N = ratio_N.clamp(0 if clip.low is None else 1 - clip.low, 1 + clip.high)
    return TokenLosses(-bounded_N * batch.advantages_N * logprobs_N, bounded_N != ratio_N)


def sapo(logprobs_N: torch.Tensor, batch: Batch, clip: ClipConfig) -> TokenLosses:
    """SAPO's soft gate -sigmoid(t (r - 1)) 4 / t A (arXiv:2511.20347): the gradient fades as r leaves 1, faster for
    negative advantages, whose temperature is higher. Nothing is clipped.
    """
    assert clip.positive_temperature is not None
    assert clip.negative_temperature is not None
    ratio_N = (logprobs_N - batch.old_logprobs_N).exp()
    hot_N = torch.full_like(ratio_N, clip.negative_temperature)
    temperature_N = torch.where(batch.advantages_N > 0, clip.positive_temperature, hot_N)
    gate_N = torch.sigmoid(temperature_N * (ratio_N - 1)) * 4 / temperature_N
    return TokenLosses(-gate_N * batch.advantages_N, torch.zeros_like(ratio_N, dtype=torch.bool))


def as_policy_loss(loss: PolicyLoss | PolicyLossFn) -> PolicyLoss:
    """The loss itself, or a plain function with the clip of PPO."""
    return loss if isinstance(loss, PolicyLoss) else PolicyLoss(function=loss)


def _clip(ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip: ClipConfig) -> TokenLosses:
    assert clip.low is not None
    assert clip.high is not None
    free_N = ratio_N * advantages_N
    gain_N = torch.minimum(free_N, ratio_N.clamp(1 - clip.low, 1 + clip.high) * advantages_N)
    if clip.dual is not None:
        gain_N = torch.where(advantages_N < 0, torch.maximum(gain_N, clip.dual * advantages_N), gain_N)
    return TokenLosses(-gain_N, gain_N != free_N)


_GSPO = PolicyLoss(
    function=gspo,
    clip=ClipConfig(low=3e-4, high=4e-4),  # the paper's: a trajectory's mean leaves 1 by less than a token's ratio,
    old_logprobs=OldLogprobs.RECOMPUTE,  # but by more than that for the sampler's rounding alone
    is_joint=True,
)

LOSSES: Mapping[str, PolicyLoss] = {
    "clipped": PolicyLoss(function=clipped, stale_clip=ClipConfig(low=0.2, high=0.28, dual=2.0)),
    "gspo": replace(_GSPO, is_uniform=True),
    "gspo_token": replace(_GSPO, function=gspo_token),
    "cispo": PolicyLoss(function=cispo, clip=ClipConfig(high=4.0), uses=("low", "high")),
    "sapo": PolicyLoss(
        function=sapo,
        clip=ClipConfig(positive_temperature=1.0, negative_temperature=1.05),
        uses=("positive_temperature", "negative_temperature"),
    ),
}
"""The names of `unbroken train --loss`."""


def mean_log_ratio(logprobs_N: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[N] the mean of logprob - old logprob over the trajectory of each token, in float64 and without gradient.

    Raises `InvalidInputError` if a trajectory has several rows and its sum was not asked for (`PolicyLoss.is_joint`).
    """

    def log_ratio(sums: TrajectorySums) -> float:
        if sums.log_ratio is None:
            raise InvalidInputError(
                "a loss that reads mean_log_ratio must be given as PolicyLoss(..., is_joint=True), got one that is not"
            )
        return sums.log_ratio

    log_ratio_N = (logprobs_N.detach() - batch.old_logprobs_N).double()
    sums_N, counts_N = sum_by_trajectory(log_ratio_N, batch.num_row_tokens, batch.trajectories, log_ratio)
    return sums_N / counts_N


def sum_by_trajectory(
    values_N: torch.Tensor,
    num_row_tokens: Sequence[int],
    trajectories: Sequence[TrajectorySums | None],
    sum_of: Callable[[TrajectorySums], float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] the sum over the trajectory of each token, and [N] its number of tokens.

    A row is usually a whole trajectory, whose sums a forward pass sees. A trajectory that forked has several rows,
    perhaps in several passes: its sums come with the batch, computed before the update (`Batch.trajectories`).

    Worked example, values 1 2 | 4 in rows of 2 and 1, of which the second is part of a trajectory of 3 tokens with the
    sum 9: sums 3 3 9 and counts 2 2 3.
    """
    counts_R = torch.tensor(list(num_row_tokens), device=values_N.device, dtype=torch.long)
    rows_N = torch.arange(len(counts_R), device=values_N.device).repeat_interleave(counts_R)
    sums_R = values_N.new_zeros(len(counts_R)).index_add(0, rows_N, values_N)
    for row, sums in enumerate(trajectories):
        if sums is not None:
            sums_R[row], counts_R[row] = sum_of(sums), sums.num_tokens
    return sums_R[rows_N], counts_R[rows_N]


def token_weight(
    normalization: LossNormalization,
    *,
    num_trajectory_tokens: int,
    num_trajectories: int,
    num_loss_tokens: int,
    max_trajectory_tokens: int | None = None,
) -> float:
    """The weight of each loss token of a trajectory with `num_trajectory_tokens` of them, over all of its rows; the
    loss is the sum of weights times token losses.

    Worked example, two trajectories with 3 and 1 loss tokens, none longer than 4. Whether the first is one row of 3
    tokens, or a row of 2 and one of 1, changes no weight:

        TOKEN     1/4  1/4  1/4 | 1/4      equal tokens: the long trajectory weighs three times as much
        SEQUENCE  1/6  1/6  1/6 | 1/2      equal trajectories: a token of a long one weighs less
        CONSTANT  1/8  1/8  1/8 | 1/8      equal tokens, and the sum grows with the trajectories' lengths

    `num_trajectories` and `num_loss_tokens` are those of the update, over all its micro batches and processes. CONSTANT
    divides by `max_trajectory_tokens`, which must be the same in all updates.

    Raises:
        InvalidInputError: a number is not positive, or with CONSTANT `max_trajectory_tokens` is missing or exceeded.
    """
    counts = {
        "num_trajectory_tokens": num_trajectory_tokens,
        "num_trajectories": num_trajectories,
        "num_loss_tokens": num_loss_tokens,
    }
    for name, count in counts.items():
        if count < 1:
            raise InvalidInputError(f"{name} must be at least 1, got {count}")
    match normalization:
        case LossNormalization.TOKEN:
            return 1 / num_loss_tokens
        case LossNormalization.SEQUENCE:
            return 1 / (num_trajectories * num_trajectory_tokens)
        case LossNormalization.CONSTANT:
            if max_trajectory_tokens is None or max_trajectory_tokens < num_trajectory_tokens:
                raise InvalidInputError(
                    "max_trajectory_tokens must be at least the loss tokens of any trajectory, got "
                    f"{max_trajectory_tokens} for one of {num_trajectory_tokens}"
                )
            return 1 / (num_trajectories * max_trajectory_tokens)


class CorrectionWeights(NamedTuple):
    """Factors of the tokens' losses, without gradient, and which tokens were truncated or masked (bool)."""

    weights_N: torch.Tensor
    corrected_N: torch.Tensor


def correction_weights(
    trainer_logprobs_N: torch.Tensor,
    rollout_logprobs_N: torch.Tensor,
    num_row_tokens: Sequence[int],
    correction: Correction,
    trajectories: Sequence[TrajectorySums | None] = (),
) -> CorrectionWeights:
    """The factor of each token's loss that corrects for the gap between sampler and trainer: rounding, kernels, older
    weights. It depends on the trainer's logprobs before the update and on the sampler's.

    The ratio is the trainer's probability of a sampled id divided by the sampler's (importance sampling). A correction
    is only needed if the loss's own ratio is relative to the trainer's logprobs (`OldLogprobs.RECOMPUTE`); a ratio to
    the sampler's corrects already. A trajectory that forked into several rows has one product over all of them.

    Worked example, two rows of two tokens with the ratios 1.5, 2 and 1, 0.5, bounds 0.6 and 1.8:

        token_truncate      1.5  1.8   1    0.5
        token_mask          1.5  0     1    0
        sequence_truncate   1.8  1.8   0.5  0.5      products 3 and 0.5
        sequence_mask       0    0     0    0

    `num_row_tokens` are the loss tokens of each row, in order; `trajectories` are those of the batch.

    Raises:
        InvalidInputError: shapes differ, or the rows do not add up to N.
    """
    if trainer_logprobs_N.shape != rollout_logprobs_N.shape or sum(num_row_tokens) != len(trainer_logprobs_N):
        raise InvalidInputError(
            f"trainer_logprobs, rollout_logprobs and the rows must have the same tokens, got "
            f"{tuple(trainer_logprobs_N.shape)}, {tuple(rollout_logprobs_N.shape)} and {sum(num_row_tokens)}"
        )
    with torch.no_grad():
        log_ratio_N = trainer_logprobs_N.double() - rollout_logprobs_N.double()
        sums_N, _ = sum_by_trajectory(log_ratio_N, num_row_tokens, trajectories, lambda sums: sums.sampler_gap)
        weights_N, corrected_N = _compute_weights(log_ratio_N.exp(), sums_N.exp(), correction)
        return CorrectionWeights(weights_N.to(trainer_logprobs_N.dtype), corrected_N)


def _compute_weights(
    ratios_N: torch.Tensor, products_N: torch.Tensor, correction: Correction
) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = correction.bounds
    match correction.effect:
        case CorrectionKind.TOKEN_TRUNCATE:
            return ratios_N.clamp(max=high), ratios_N > high
        case CorrectionKind.TOKEN_MASK:
            return _mask(ratios_N, low, high)
        case CorrectionKind.SEQUENCE_TRUNCATE:
            return products_N.clamp(max=high), products_N > high
        case CorrectionKind.SEQUENCE_MASK:
            return _mask(products_N, low, high)
        case _:
            return torch.ones_like(ratios_N), torch.zeros_like(ratios_N, dtype=torch.bool)


def _mask(ratios_N: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    corrected_N = (ratios_N < low) | (ratios_N > high)
    return ratios_N.masked_fill(corrected_N, 0), corrected_N


def kl_penalty(
    estimator: KlEstimator, logprobs_N: torch.Tensor, reference_N: torch.Tensor, old_logprobs_N: torch.Tensor
) -> torch.Tensor:
    """[N] the distance of the policy to a reference policy at each token, with the gradient of the logprobs.

    With d = logprob - reference logprob of an id that the policy samples, k1, k2 and k3 estimate
    KL(policy || reference) (Schulman, "Approximating KL Divergence", 2020). Worked example: the policy gives a sampled
    id the probability 1/2, the reference 1/4, so d = log 2:

        k1    d                  0.6931     no bias, may be negative
        k2    d^2 / 2            0.2402     biased, little variance; its gradient is that of the KL
        k3    exp(-d) - 1 + d    0.1931     no bias, never negative

    `old_logprobs_N` is for the ratio that weighs `K3_RATIO_WEIGHTED`. Raises `InvalidInputError` if shapes differ.
    """
    match estimator:
        case KlEstimator.K1:
            return _subtract(logprobs_N, reference_N)
        case KlEstimator.K2:
            return _subtract(logprobs_N, reference_N).square() / 2
        case KlEstimator.K3:
            return k3(logprobs_N, reference_N)
        case KlEstimator.K3_RATIO_WEIGHTED:
            return _subtract(logprobs_N, old_logprobs_N).exp() * k3(logprobs_N, reference_N)


def k3(logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """[N] exp(reference - logprob) - (reference - logprob) - 1, the penalty of GRPO (arXiv:2402.03300)."""
    gap_N = _subtract(reference_N, logprobs_N)
    return torch.expm1(gap_N) - gap_N


def _subtract(left_N: torch.Tensor, right_N: torch.Tensor) -> torch.Tensor:
    if left_N.shape != right_N.shape:
        raise InvalidInputError(
            f"logprobs and reference must share one shape [N], got {tuple(left_N.shape)}, {tuple(right_N.shape)}"
        )
    return left_N - right_N
