"""Statistics of a step: those of each process, their sums over all processes, and the metrics of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from unbroken.training.metrics.mismatch import Mismatch, k3_by_lag, mismatch
from unbroken.training.metrics.writer import Metrics
from unbroken.training.model.routing import RoutingStats
from unbroken.training.objective.base import LossStats, ObjectiveStats
from unbroken.training.objective.supervised import SupervisedStats
from unbroken.training.teachers import TeacherSums, summarize_teachers
from unbroken.types import Logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Statistics of one step, over the rows of all processes."""

    policy_version: int
    """That of the weights after the step."""
    num_rows: int
    num_tokens: int
    """Ids in the rows, prompts included."""
    padding_share: float
    """Share of padding in all ids that the updates fed to the model."""
    shared_share: float
    """Share of the rows' ids that were not fed to the model, because another row of the pass begins with them too."""
    num_loss_tokens: int
    num_updates: int
    """Optimizer updates: the minibatches that had rows, in all iterations."""
    loss: float
    """Mean over the updates."""
    objective: ObjectiveStats | None
    """Statistics that only this objective has, such as `PairStats` of `OnlineDpo`."""
    supervised: SupervisedStats | None
    """Of the supervised rows of all updates; None without any."""
    clip_fraction: float
    corrected_fraction: float
    """Share of loss tokens that the correction truncated or masked."""
    entropy: float
    """Of the policy at a loss token, in nats, before its update; mean over the step. Over the kept ids where the
    sampler cut some (top-k, top-p, min-p)."""
    full_entropy: float
    """The same over the whole vocabulary, at the same temperature."""
    mean_ratio: float
    k3: float
    """Estimate of KL(old policy || policy) over the step's updates."""
    reference_k3: float | None
    """Estimate of KL(policy || reference) over the step's updates; None without a reference."""
    forward_kl: float | None = None
    """Mean of KL(teacher || policy) over the teacher's most likely ids; None unless they were learned."""
    grad_norm: float
    """Before clipping, mean over the updates."""
    learning_rate: float
    """That of the last update."""
    entropy_weight: float | None
    """After the last update; None without `TrainerConfig.entropy_control`."""
    router_loss: float | None
    """Of the last update, before it and without its weight; None without `TrainerConfig.router_loss_weight`."""
    mismatch: Mismatch
    """Trainer against sampler on the first minibatch, before its update; the others see weights that have changed."""
    k3_by_lag: dict[str, float | None]
    """`mismatch.k3` of the tokens of each lag in `LAGS`: rounding at lag 0, older weights beyond."""
    proven_share: float | None
    """Share of the first minibatch's tokens that were compared to the bit, which those of older weights are not; None
    without `Numerics.EXACT`."""
    routing: RoutingStats | None
    """Recorded experts that were replayed on the first minibatch; None if none were to be (`routing_replay`)."""
    staleness_mean: float
    """Policy versions between the weights that sampled a loss token and those the step began with."""
    staleness_max: int
    ids_by_staleness: dict[int, int]
    """Number of loss tokens for each of these numbers of versions that occurs."""
    seconds: float
    teachers: Mapping[str, TeacherSums] = field(default_factory=dict)
    """By name; empty without teachers."""
    policies: Mapping[str, StepStats | None] = field(default_factory=dict)
    """Of several policies those of each, by name, None if it had nothing to train on; all other fields are then of all
    of them, of which each counts as a process does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """Statistics of one optimizer update in one process, before the weights change."""

    loss: LossStats
    objective: ObjectiveStats | None
    supervised: SupervisedStats = field(default_factory=SupervisedStats)
    """Of the supervised rows that were trained with the others, which all other fields leave out but `grad_norm`."""
    num_tokens: int
    """Ids in the rows, prompts included."""
    num_padding: int
    num_shared: int
    """Ids of rows that another row of their pass has in common with them."""
    logprobs: Logprobs
    """[N] of the process's loss tokens in this minibatch."""
    rollout_logprobs: Logprobs
    """[N]"""
    versions: NDArray[np.int32]
    """[N] policy version that sampled the token."""
    grad_norm: float
    """Over all processes, the same in each."""
    learning_rate: float
    entropy_weight: float | None = None
    """After it, with `TrainerConfig.entropy_control`."""
    router_loss: float | None = None
    """Before it, with `TrainerConfig.router_loss_weight`."""
    routing: RoutingStats = field(default_factory=RoutingStats)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStats:
    """Statistics of one step in one process."""

    num_rows: int
    num_tokens: int
    staleness: NDArray[np.int32]
    """[N] per loss token."""
    updates: tuple[UpdateStats, ...]
    """The same number in every process."""
    teachers: Mapping[str, TeacherSums] = field(default_factory=dict)
    """By name, the same names in every process."""


def merge_stats(
    processes: Sequence[ProcessStats],
    *,
    policy_version: int,
    has_reference: bool,
    seconds: float,
    replays_routing: bool = False,
    is_exact: bool = False,
) -> StepStats:
    """Add up the statistics of all processes, of which at least one had rows; the step made `policy_version`."""
    everywhere = [update for process in processes for update in process.updates]
    loss = reduce(add, (update.loss for update in everywhere))
    supervised = reduce(add, (update.supervised for update in everywhere))
    updates = processes[0].updates
    num_trained, num_padding, num_shared = _sum_ids(everywhere)
    staleness = np.concatenate([process.staleness for process in processes])
    first = _FirstMinibatch.of(processes)
    is_proven = first.versions == policy_version - 1
    return StepStats(
        policy_version=policy_version,
        num_rows=sum(process.num_rows for process in processes),
        num_tokens=sum(process.num_tokens for process in processes),
        padding_share=num_padding / (num_trained - num_shared + num_padding),
        shared_share=num_shared / num_trained,
        num_loss_tokens=len(staleness),
        num_updates=len(updates),
        loss=loss.loss_sum / len(updates),
        objective=_sum_objectives(everywhere),
        supervised=supervised if supervised.num_rows else None,
        clip_fraction=loss.clip_fraction,
        corrected_fraction=loss.corrected_fraction,
        entropy=loss.entropy,
        full_entropy=loss.full_entropy,
        mean_ratio=loss.mean_ratio,
        k3=loss.k3,
        reference_k3=loss.reference_k3 if has_reference else None,
        forward_kl=loss.forward_kl,
        grad_norm=float(np.mean([update.grad_norm for update in updates])),
        learning_rate=updates[-1].learning_rate,
        entropy_weight=updates[-1].entropy_weight,
        router_loss=updates[-1].router_loss,
        mismatch=mismatch(first.logprobs, first.rollout_logprobs),
        k3_by_lag=k3_by_lag(first.logprobs, first.rollout_logprobs, policy_version - 1 - first.versions),
        proven_share=float(np.mean(is_proven)) if is_exact else None,
        routing=first.routing if replays_routing else None,
        staleness_mean=float(staleness.mean()),
        staleness_max=int(staleness.max()),
        ids_by_staleness=_count_values(staleness),
        seconds=seconds,
        teachers={
            name: reduce(add, (process.teachers[name] for process in processes)) for name in processes[0].teachers
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FirstMinibatch:
    """The loss tokens of a step's first minibatch in all processes: no update has changed the weights before."""

    logprobs: Logprobs
    rollout_logprobs: Logprobs
    versions: NDArray[np.int32]
    routing: RoutingStats

    @classmethod
    def of(cls, processes: Sequence[ProcessStats]) -> _FirstMinibatch:
        first = [process.updates[0] for process in processes]
        return cls(
            logprobs=np.concatenate([update.logprobs for update in first]),
            rollout_logprobs=np.concatenate([update.rollout_logprobs for update in first]),
            versions=np.concatenate([update.versions for update in first]),
            routing=reduce(add, (update.routing for update in first)),
        )


def _sum_ids(updates: Sequence[UpdateStats]) -> tuple[int, int, int]:
    """The ids in the rows, once for each iteration; in padding; and those that rows of a pass share."""
    counts = [(update.num_tokens, update.num_padding, update.num_shared) for update in updates]
    num_tokens, num_padding, num_shared = map(sum, zip(*counts, strict=True))
    return num_tokens, num_padding, num_shared


def _sum_objectives(updates: Sequence[UpdateStats]) -> ObjectiveStats | None:
    known = [update.objective for update in updates if update.objective is not None]
    return reduce(add, known) if known else None


def _count_values(values: NDArray[np.int32]) -> dict[int, int]:
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def mismatch_metrics(found: Mismatch) -> Metrics:
    """The metrics of the trainer's logprobs against the sampler's."""
    return {
        "mismatch/num_tokens": found.num_tokens,
        "mismatch/k3": found.k3,
        "mismatch/max_abs": found.max_abs,
        "mismatch/equal_share": found.equal_share,
        "mismatch/share_off_20pct": found.share_off_20pct,
    }


def step_metrics(stats: StepStats) -> Metrics:
    """The metrics to log of one step."""
    return {
        "train/policy_version": stats.policy_version,
        "train/num_rows": stats.num_rows,
        "train/num_tokens": stats.num_tokens,
        "train/padding_share": stats.padding_share,
        "train/shared_share": stats.shared_share,
        "train/num_loss_tokens": stats.num_loss_tokens,
        "train/num_updates": stats.num_updates,
        "train/loss": stats.loss,
        **({} if stats.objective is None else stats.objective.get_metrics()),
        **({} if stats.supervised is None else stats.supervised.get_metrics()),
        "train/clip_fraction": stats.clip_fraction,
        "train/corrected_fraction": stats.corrected_fraction,
        "train/entropy": stats.entropy,
        "train/full_entropy": stats.full_entropy,
        "train/mean_ratio": stats.mean_ratio,
        "train/k3": stats.k3,
        "train/reference_k3": stats.reference_k3,
        **summarize_teachers(stats.teachers, num_tokens=stats.num_loss_tokens, forward_kl=stats.forward_kl),
        "train/grad_norm": stats.grad_norm,
        "train/learning_rate": stats.learning_rate,
        "train/entropy_weight": stats.entropy_weight,
        "train/router_loss": stats.router_loss,
        **mismatch_metrics(stats.mismatch),
        **{f"mismatch/k3_lag_{lag}": k3 for lag, k3 in stats.k3_by_lag.items()},
        "mismatch/proven_share": stats.proven_share,
        "mismatch/routing_differs": None if stats.routing is None else stats.routing.different_share,
        "mismatch/routing_live_share": None if stats.routing is None else stats.routing.live_share,
        "staleness/mean": stats.staleness_mean,
        "staleness/max": stats.staleness_max,
        **{f"staleness/num_ids_lag_{lag}": num_ids for lag, num_ids in stats.ids_by_staleness.items()},
        "seconds/train": stats.seconds,
        "tokens_per_s/training": stats.num_tokens / stats.seconds,
        **_policy_metrics(stats.policies),
    }


def _policy_metrics(policies: Mapping[str, StepStats | None]) -> Metrics:
    """Of each of several policies, what may differ from the others."""
    found: dict[str, float | None] = {}
    for name, stats in policies.items():
        numbers: Metrics = {} if stats is None else step_metrics(stats)
        found[f"policy/{name}/num_rows"] = numbers.get("train/num_rows", 0)
        for key in ("train/loss", "train/entropy", "train/clip_fraction", "train/grad_norm", "mismatch/k3"):
            found[f"policy/{name}/{key.removeprefix('train/').replace('/', '_')}"] = numbers.get(key)
    return found
