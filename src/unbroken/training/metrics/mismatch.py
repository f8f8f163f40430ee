"""The difference of the trainer's and the sampler's logprobs of the same ids: only rounding, if weights are equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import InvalidInputError, InvariantError, PolicyMismatchError
from unbroken.types import Logprobs, TrainingSample

LAGS = ("0", "1", "2_plus")
"""Policy versions between the weights that sampled a token and the trainer's."""
OFF_SHARE = 0.2
"""Ratios further than this from 1 are counted; PPO clips at about the same distance."""
_LEAST_IDS = 256
"""Of fewer ids one improbable id alone could look like another policy, so the others are taken to agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The trainer's logprobs against the sampler's."""

    num_tokens: int
    k3: float
    """Estimate of KL(sampler || trainer): mean of ratio - 1 - log(ratio), ratio = trainer / sampler. One token may
    contribute most of it."""
    max_abs: float
    """Largest absolute difference of two logprobs."""
    equal_share: float
    """Share of tokens whose two logprobs are the same number."""
    share_off_20pct: float
    """Share of tokens whose ratio is below 0.8 or above 1.2."""


def mismatch(logprobs: NDArray[Any], rollout_logprobs: NDArray[Any]) -> Mismatch:
    """Compare the trainer's logprobs with the sampler's, both [N] for the same N sampled ids, in float64.

    Raises:
        InvalidInputError: N is 0, the shapes differ, or a value is not finite.
    """
    trainer = np.asarray(logprobs, dtype=np.float64)
    sampler = np.asarray(rollout_logprobs, dtype=np.float64)
    if trainer.ndim != 1 or trainer.shape != sampler.shape or len(trainer) == 0:
        raise InvalidInputError(
            f"logprobs and rollout_logprobs must share one shape [N] with N >= 1, got {trainer.shape}, {sampler.shape}"
        )
    for name, values in (("logprobs", trainer), ("rollout_logprobs", sampler)):
        if not np.isfinite(values).all():
            where = int(np.flatnonzero(~np.isfinite(values))[0])
            raise InvalidInputError(
                f"{name}[{where}] is {values[where]}: compare sampled ids only, which have a number"
            )
    log_ratio = trainer - sampler
    return Mismatch(
        num_tokens=len(log_ratio),
        k3=float(np.mean(np.expm1(log_ratio) - log_ratio)),
        max_abs=float(np.abs(log_ratio).max()),
        equal_share=float(np.mean(trainer == sampler)),
        share_off_20pct=float(np.mean(np.abs(np.expm1(log_ratio)) > OFF_SHARE)),
    )


def k3_by_lag(
    logprobs: NDArray[Any], rollout_logprobs: NDArray[Any], lags: NDArray[np.int32]
) -> dict[str, float | None]:
    """The k3 of the tokens of each lag in `LAGS`, None without such tokens; all arguments are [N].

    Worked example: lags 0, 3 and 2 give a number for "0", None for "1", and a mean over two tokens for "2_plus". Raises
    `InvalidInputError` if the shapes differ, or as `mismatch` does.
    """
    if lags.shape != np.shape(logprobs):
        raise InvalidInputError(f"lags must have the shape of logprobs, {np.shape(logprobs)}, got {lags.shape}")
    groups = zip(LAGS, (lags == 0, lags == 1, lags >= 2), strict=True)
    return {
        name: mismatch(logprobs[chosen], rollout_logprobs[chosen]).k3 if chosen.any() else None
        for name, chosen in groups
    }


def check_same_bits(samples: Sequence[TrainingSample], logprobs: Sequence[Logprobs], policy_version: int) -> None:
    """Check that the trainer's logprobs of loss tokens, one array per row, are those of the sampler, to the bit, for
    ids that were sampled with the weights of `policy_version`, which are the trainer's.

    Raises:
        InvariantError: one is not, with its row and position.
    """
    for row, (sample, trained) in enumerate(zip(samples, logprobs, strict=True)):
        positions = np.flatnonzero(sample.loss_mask)
        sampled = sample.rollout_logprobs[positions]
        differ = (sampled != trained) & (sample.policy_versions[positions] == policy_version)
        if differ.any():
            first = int(np.flatnonzero(differ)[0])
            raise InvariantError(
                f"numerics are exact, but {int(differ.sum())} of {len(positions)} logprobs of row {row} differ: at "
                f"position {positions[first]}, id {sample.token_ids[positions[first]]} has {sampled[first]!r} from the "
                f"sampler and {trained[first]!r} from the trainer, both by policy version {policy_version}. "
                "Does the sampler have exact numerics too? Can the model have them here (`unbroken numerics MODEL`)? "
                "With --trainer.numerics fast a run begins, or continues, without this proof"
            )


def check_one_policy(
    samples: Sequence[TrainingSample], logprobs: Sequence[Logprobs], *, policy_version: int, max_k3: float
) -> Mismatch | None:
    """Check that sampler and trainer have one policy (I9), and return their mismatch; None if nothing can be compared.

    `logprobs` are the trainer's, one array for the loss tokens of each row. Rows count whose ids were all sampled with
    the weights of `policy_version`, which are the trainer's: an id after those of older weights may have been sampled
    with their keys and values.

    Raises:
        PolicyMismatchError: k3 is above `max_k3`, which is more than rounding.
    """
    own = [
        (sample, trained)
        for sample, trained in zip(samples, logprobs, strict=True)
        if len(trained) and (sample.policy_versions[sample.sampled_mask] == policy_version).all()
    ]
    if not own:
        return None
    trainer = np.concatenate([trained for _, trained in own])
    sampler = np.concatenate([sample.rollout_logprobs[sample.loss_mask] for sample, _ in own])
    found = mismatch(trainer, sampler)
    if found.k3 * found.num_tokens <= max_k3 * max(found.num_tokens, _LEAST_IDS):
        return found
    ids = np.concatenate([sample.token_ids[sample.loss_mask] for sample, _ in own])
    worst = int(np.abs(trainer.astype(np.float64) - sampler).argmax())
    raise PolicyMismatchError(
        f"sampler and trainer have two policies (I9): k3 is {found.k3:.3g} over {found.num_tokens} ids that both score "
        f"by policy version {policy_version}, where rounding explains up to {max_k3:g}; the largest difference is "
        f"{found.max_abs:.3g} nats, of id {ids[worst]} with {sampler[worst]:.4g} from the sampler and "
        f"{trainer[worst]:.4g} from the trainer, and {100 * found.share_off_20pct:.1f} % of the ratios are off by more "
        "than 20 %. Has the engine other weights, another config or a wrong kernel? `unbroken numerics MODEL` shows "
        "where both differ, and --engine.options=--enforce-eager leaves out vLLM's graphs; a mismatch that you "
        "want is allowed by trainer.max_policy_k3"
    )


def mismatch_of_rows(samples: Sequence[TrainingSample], logprobs: Sequence[Logprobs]) -> Mismatch:
    """Compare logprobs from `Trainer.logprobs(samples)`, one array [T] per row, with the sampler's on all sampled ids.

    Raises:
        InvalidInputError: no id was sampled, numbers of rows or lengths differ, or a value is not finite.
    """
    if len(samples) != len(logprobs):
        raise InvalidInputError(f"logprobs must hold one array for each of {len(samples)} samples, got {len(logprobs)}")
    for k, (sample, of_row) in enumerate(zip(samples, logprobs, strict=True)):
        if len(of_row) != len(sample.token_ids):
            raise InvalidInputError(f"logprobs[{k}] has {len(of_row)} entries for {len(sample.token_ids)} token_ids")
    pairs = [
        (of_row[sample.sampled_mask], sample.rollout_logprobs[sample.sampled_mask])
        for sample, of_row in zip(samples, logprobs, strict=True)
    ]
    trainer, sampler = zip(*pairs, strict=True) if pairs else ((np.zeros(0),), (np.zeros(0),))
    return mismatch(np.concatenate(trainer), np.concatenate(sampler))
