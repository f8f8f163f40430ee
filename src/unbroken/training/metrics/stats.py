"""What a step did: the parts each process has, and the whole they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from unbroken.training.metrics.mismatch import Mismatch, k3_by_lag, mismatch
from unbroken.training.objective.losses import LossStats
from unbroken.training.objective.preferences import PairStats
from unbroken.types import Logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one step did, over the rows of all processes."""

    policy_version: int
    """Of the weights after the step."""
    num_rows: int
    num_tokens: int
    """Ids in the rows, given ones included."""
    padding_share: float
    """Of all ids that the updates fed to the model, those that belong to no row."""
    num_loss_tokens: int
    num_updates: int
    """Optimizer updates: the minibatches that had rows."""
    loss: float
    """What was minimised; the mean over the updates."""
    pairs: PairStats | None
    """None where rows were trained on, not pairs."""
    clip_fraction: float
    corrected_fraction: float
    """Share of loss tokens that the correction truncated or masked."""
    mean_ratio: float
    k3: float
    """Estimate of KL(old policy || policy) over the step's updates."""
    reference_k3: float | None
    """Estimate of KL(policy || reference) over the step's updates; None where no reference is computed."""
    grad_norm: float
    """Before clipping; the mean over the updates."""
    learning_rate: float
    """Of the last update."""
    mismatch: Mismatch
    """Trainer against sampler before the first update, on the rows of the first minibatch: the others are only seen
    when the weights have already moved."""
    k3_by_lag: dict[str, float | None]
    """`mismatch.k3` of the tokens of each lag in `LAGS`: what old weights add to what rounding does."""
    staleness_mean: float
    """Policy versions between the weights that sampled a loss token and those the step began with."""
    staleness_max: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """What one process saw of one optimizer update, before its weights moved."""

    loss: LossStats
    pairs: PairStats | None
    """None where rows are trained on, not pairs."""
    num_padding: int
    """Ids fed to the model that belong to no row."""
    logprobs: Logprobs
    """[N] of the process's loss tokens in this minibatch."""
    rollout_logprobs: Logprobs
    """[N]"""
    versions: NDArray[np.int32]
    """[N] policy version that sampled the token."""
    grad_norm: float
    """Over all processes, so equal in each."""
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStats:
    """What one process saw of one step."""

    num_rows: int
    num_tokens: int
    staleness: NDArray[np.int32]
    """[N] per loss token."""
    updates: tuple[UpdateStats, ...]
    """As many in every process."""


def merge_stats(
    processes: Sequence[ProcessStats], *, policy_version: int, has_reference: bool, seconds: float
) -> StepStats:
    """Add up what the processes saw of the step that made `policy_version`; at least one of them had rows."""
    loss = reduce(add, (update.loss for process in processes for update in process.updates))
    pairs = [update.pairs for process in processes for update in process.updates if update.pairs is not None]
    updates = processes[0].updates
    num_tokens = sum(process.num_tokens for process in processes)
    num_padding = sum(update.num_padding for process in processes for update in process.updates)
    staleness = np.concatenate([process.staleness for process in processes])
    first = [process.updates[0] for process in processes]
    logprobs = np.concatenate([update.logprobs for update in first])
    rollout_logprobs = np.concatenate([update.rollout_logprobs for update in first])
    versions = np.concatenate([update.versions for update in first])
    return StepStats(
        policy_version=policy_version,
        num_rows=sum(process.num_rows for process in processes),
        num_tokens=num_tokens,
        padding_share=num_padding / (num_tokens + num_padding),
        num_loss_tokens=loss.num_tokens,
        num_updates=len(updates),
        loss=loss.loss_sum / len(updates),
        pairs=reduce(add, pairs) if pairs else None,
        clip_fraction=loss.clip_fraction,
        corrected_fraction=loss.corrected_fraction,
        mean_ratio=loss.mean_ratio,
        k3=loss.k3,
        reference_k3=loss.reference_k3 if has_reference else None,
        grad_norm=float(np.mean([update.grad_norm for update in updates])),
        learning_rate=updates[-1].learning_rate,
        mismatch=mismatch(logprobs, rollout_logprobs),
        k3_by_lag=k3_by_lag(logprobs, rollout_logprobs, policy_version - 1 - versions),
        staleness_mean=float(staleness.mean()),
        staleness_max=int(staleness.max()),
        seconds=seconds,
    )
