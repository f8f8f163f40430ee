"""From trajectories to their rows with advantages. A trajectory that gives no row is counted, by reason.

Worked example: five siblings of one problem, GRPO without normalisation.

    trajectory   status      reward   advantage         rows, one per branch
    a            completed   1        1 - 1/2 =  1/2    token_ids 5 6 7 8    loss_mask 0 0 1 1    advantages 0 0 1/2 1/2
    b            completed   0        0 - 1/2 = -1/2    token_ids 5 6 9      loss_mask 0 0 1      advantages 0 0 -1/2
    c            max_turns   0        0 - 1/2 = -1/2    ... (the policy itself ran out of turns; or timeout)
    d            truncated   1        1 - 1/2 =  1/2    ... (the policy itself ran out of ids)
    e            failed      None     not compared      none, and `dropped_rows/failed` is 1

If a to d all had reward 1, `dropped_rows/no_variance` would be 4, and their rows idle: they only count in the divisor
of the loss. If only a had not failed, there would be no member to compare it with: `dropped_rows/small_group` would be
1. With a reference, groups of equal rewards and unscored members are kept for their distance to it: they give rows with
the advantage 0 and are not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from unbroken.counters import Counters, Event
from unbroken.errors import InvalidInputError, RewardError
from unbroken.ledger.tree import export_samples
from unbroken.rollout.trajectory import SpanReward, Trajectory, TrajectoryGroup, TrajectoryStatus
from unbroken.training.loss_config import FailedRows, OverlongConfig, TruncatedRows
from unbroken.training.objective.advantages import Advantages, StepAdvantages, TurnAdvantages, all_equal, check_rewards
from unbroken.training.objective.comparison import (
    ALONE,
    MIN_GROUP_SIZE,
    ComparedGroup,
    GroupAdvantages,
    Processes,
    compute_advantages,
    get_min_group_size,
    get_parts,
    place_rewards,
)
from unbroken.training.teachers import TeacherTask
from unbroken.types import TrainingSample

TRAINABLE = frozenset(
    {
        TrajectoryStatus.COMPLETED,
        TrajectoryStatus.TRUNCATED,
        TrajectoryStatus.MAX_TURNS,
        TrajectoryStatus.MAX_TOKENS,
        TrajectoryStatus.TIMEOUT,
    }
)
"""Endings that the policy itself can have caused. Failures and aborts have other causes; what is unscored cannot be
compared."""


class DropReason(StrEnum):
    """Why a trainable trajectory gives no row to train; the others are counted under their status."""

    NO_VARIANCE = "no_variance"
    """Every advantage of its group is zero, and the loss has no other term."""
    MASKED = "masked"
    """A length limit cut it, and `TruncatedRows.MASK` leaves out its ids."""
    SMALL_GROUP = "small_group"
    """Fewer than `MIN_GROUP_SIZE` siblings are left."""
    NOT_PAIRED = "not_paired"
    """Others of its group are in preference pairs, and it is not (online DPO)."""
    NOTHING_SAMPLED = "nothing_sampled"
    """It has no sampled id."""


class _PunishmentReason(StrEnum):
    """Why a trajectory loses a part of its reward."""

    OVERLONG = "overlong"
    """It is long (`OverlongConfig`)."""


FAILED = frozenset({TrajectoryStatus.FAILED})
"""Endings that `FailedRows` is about."""
UNSCORED = frozenset({TrajectoryStatus.UNSCORED})
"""Endings without a reward, which are not compared."""
CUT_BY_LENGTH = frozenset({TrajectoryStatus.TRUNCATED, TrajectoryStatus.MAX_TOKENS})
"""Endings that `TruncatedRows.MASK` leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRows:
    """The rows of one trajectory, which is trained whole in one update; one that forked has several."""

    rows: tuple[TrainingSample, ...]
    idle_rows: tuple[TrainingSample, ...] = ()
    """Instead of `rows` if they have no gradient (`Objective.get_idle_rows`)."""
    group: str = ""
    """The id of its group."""
    trajectory: str = ""
    """Its own id."""
    reward: float | None = None
    """What it was compared by. None: it was not compared."""
    task: TeacherTask | None = None
    """Who scores it; None without a teacher."""
    policy: str | None = None
    """The policy that sampled it and is trained on it, of a run of several."""


class _RowUse(StrEnum):
    """What becomes of the rows of one trajectory."""

    TRAIN = "train"
    IDLE = "idle"
    """They have no gradient, and only count in the divisor of the loss."""
    EMPTY = "empty"
    """It counts as a trajectory in the divisor, its ids do not."""
    NONE = "none"
    """Only its reward counts, for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPolicy:
    """Which trajectories give rows, and the rewards that they are compared by."""

    keep_equal: bool = False
    """Groups whose advantages are all zero give rows too, for a loss that has other terms."""
    keep_unscored: bool = False
    """And so do members without a score."""
    overlong: OverlongConfig | None = None
    truncated: TruncatedRows = TruncatedRows.TRAIN
    failed: FailedRows = FailedRows.DROP
    failed_reward: float = 0.0

    def score_failed(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """The group with the reward of its failed members, unless they are dropped."""
        if self.failed is FailedRows.DROP:
            return group
        has_spans = any(each.span_rewards for each in group.trajectories)
        members = (
            self._score_failed(each, has_spans=has_spans) if each.status in FAILED else each
            for each in group.trajectories
        )
        return replace(group, trajectories=tuple(members))

    def _score_failed(self, member: Trajectory, *, has_spans: bool) -> Trajectory:
        """Beside spans the reward is for all ids, as every number there; otherwise each turn would have a 0 too."""
        spans: tuple[SpanReward, ...] = ()
        if has_spans and (num_ids := member.num_sampled):
            spans = (SpanReward(0, num_ids, self.failed_reward - sum(member.turn_rewards)),)
        return replace(member, reward=self.failed_reward, span_rewards=spans)

    def choose_use(self, status: TrajectoryStatus, *, is_equal: bool) -> tuple[_RowUse, DropReason | TrajectoryStatus]:
        """The use of a trajectory's rows, and the reason that it is counted under if it has none to train.

        `is_equal` says whether all advantages of its group are zero. The first rule that applies holds.
        """
        rules = (
            (status in CUT_BY_LENGTH and self.truncated is TruncatedRows.MASK, _RowUse.EMPTY, DropReason.MASKED),
            (status in FAILED and self.failed is FailedRows.BASELINE, _RowUse.NONE, status),
            (status in UNSCORED and not self.keep_unscored, _RowUse.IDLE, status),
            (is_equal and not self.keep_equal, _RowUse.IDLE, DropReason.NO_VARIANCE),
        )
        return next(
            ((use, reason) for applies, use, reason in rules if applies), (_RowUse.TRAIN, DropReason.NOTHING_SAMPLED)
        )

    @property
    def compared(self) -> frozenset[TrajectoryStatus]:
        """The endings of trajectories that are compared with each other."""
        return TRAINABLE if self.failed is FailedRows.DROP else TRAINABLE | FAILED


def build_trajectories(
    groups: Sequence[TrajectoryGroup],
    advantages: Advantages,
    counters: Counters,
    *,
    policy: RowPolicy | None = None,
    processes: Processes = ALONE,
) -> list[TrajectoryRows]:
    """The rows of each trajectory, unscored ones last; counts those without one to train under `dropped_rows`, by
    reason.

    A trajectory counts once, however many branches it has. Members that are not trainable, and groups that are too
    small, do not enter any baseline or deviation. With several `processes`, `StepAdvantages` get the rewards of all.

    Raises:
        RewardError: the reward of a trainable trajectory is not a finite number.
        InvalidInputError: a group was sampled with fewer than two members, `advantages` does not return one finite
            number per reward, or needs the rewards of turns, which the trajectories do not have.
    """
    policy = policy or RowPolicy()
    compare = partial(_compare_members, groups, policy, counters, min_size=get_min_group_size(advantages))
    comparison = compute_advantages(compare, advantages, processes)
    units: list[TrajectoryRows] = []
    for group, of_group in zip(comparison.groups, comparison.advantages, strict=True):
        is_equal = not _any_nonzero(of_group)
        for member, reward, of_member in zip(group.members, group.rewards, of_group, strict=True):
            use, reason = policy.choose_use(member.status, is_equal=is_equal)
            by_node = float(of_member) if np.ndim(of_member) == 0 else _split(member, float(reward), of_member)
            units += _make_unit(member, by_node, use, reason, counters, group=group.name, reward=float(reward))
    unscored = ((each.group_id, member) for each in groups for member in keep_trainable(each, UNSCORED))
    for name, member in unscored:
        use, reason = policy.choose_use(member.status, is_equal=False)
        units += _make_unit(member, 0.0, use, reason, counters, group=name)
    return units


def _compare_members(
    groups: Sequence[TrajectoryGroup], policy: RowPolicy, counters: Counters, *, min_size: int
) -> list[ComparedGroup]:
    """The members of each group that are compared with each other, with their rewards."""
    kept = [
        (
            group.group_id,
            keep_comparable(policy.score_failed(group), counters, UNSCORED, policy.compared, min_size=min_size),
        )
        for group in groups
    ]
    return [
        ComparedGroup(name=name, members=members, rewards=get_rewards(name, members, policy, counters))
        for name, members in kept
        if members
    ]


def has_variance(group: TrajectoryGroup, advantages: Advantages, policy: RowPolicy) -> bool:
    """Whether a group has an advantage that is not zero, or too few members to compare.

    `advantages` compare the members of a group with each other.
    """
    members = keep_trainable(policy.score_failed(group), policy.compared)
    if len(members) < MIN_GROUP_SIZE:
        return True
    rewards = get_rewards(group.group_id, members, policy)
    if isinstance(advantages, TurnAdvantages):
        turns = advantages.function([place_rewards(*each).rewards for each in zip(members, rewards, strict=True)])
        return any(np.any(of_member) for of_member in turns)
    if isinstance(advantages, StepAdvantages) and advantages.of_parts:  # sums may be equal, and parts differ
        parts = get_parts(ComparedGroup(name=group.group_id, rewards=rewards, members=members))
        return any(np.any(of_group) for of_group in advantages.function([parts]))
    if isinstance(advantages, StepAdvantages):  # they are of all groups, and zero in one whose rewards are equal
        return not all_equal(rewards)
    return bool(np.any(advantages(rewards)))  # without a baseline, equal rewards teach something


def keep_trainable(group: TrajectoryGroup, statuses: Collection[TrajectoryStatus] = TRAINABLE) -> list[Trajectory]:
    """The members with one of these statuses."""
    return [trajectory for trajectory in group.trajectories if trajectory.status in statuses]


def keep_comparable(
    group: TrajectoryGroup,
    counters: Counters,
    also_kept: Collection[TrajectoryStatus] = (),
    compared: Collection[TrajectoryStatus] = TRAINABLE,
    *,
    min_size: int = MIN_GROUP_SIZE,
) -> list[Trajectory]:
    """The members with a status in `compared`, or an empty list if too few are left; the others are counted.

    Those with a status in `also_kept` are not counted, because the caller trains on them without comparing them.

    Raises `InvalidInputError` if the group was sampled with too few members, so that no step could learn from it.
    """
    if len(group.trajectories) < min_size:
        raise InvalidInputError(
            f"group {group.group_id} must have at least {min_size} trajectories, which are compared with each "
            f"other, got {len(group.trajectories)}: sample more of each problem (n of run_group)"
        )
    for trajectory in group.trajectories:
        if trajectory.status not in compared and trajectory.status not in also_kept:
            counters.count(Event.DROPPED_ROW, trajectory.status)
    members = keep_trainable(group, compared)
    if len(members) < min_size:
        counters.count(Event.DROPPED_ROW, DropReason.SMALL_GROUP, times=len(members))
        return []
    return members


def get_rewards(
    group_id: str, members: Sequence[Trajectory], policy: RowPolicy | None = None, counters: Counters | None = None
) -> NDArray[np.float64]:
    """[G] the members' rewards, minus what they lose by `OverlongConfig`; those that lose something are counted.

    Raises `RewardError` with their names if a reward is not a finite number.
    """
    try:
        rewards = check_rewards([member.reward for member in members])
    except RewardError as error:
        ids = ", ".join(member.trajectory_id for member in members)
        raise RewardError(f"group {group_id}, trajectories {ids}: {error}") from error
    if policy is None or policy.overlong is None:
        return rewards
    lost = np.array([policy.overlong.punish(member.num_sampled) for member in members])
    if counters is not None:
        counters.count(Event.PUNISHMENT, _PunishmentReason.OVERLONG, times=int((lost > 0).sum()))
    left: NDArray[np.float64] = rewards - lost
    return left


def _split(
    member: Trajectory, reward: float, advantages: float | NDArray[np.float64]
) -> dict[int, NDArray[np.float64]]:
    """The advantages of a member's turns or spans as those of the ids of each sampled node; of given ones 0."""
    if not member.turns:
        return {}
    # Rewards stand at sampled ids, counted over all turns; a completion may have given ids between them.
    masks = [turn.sequence.sampled_mask for turn in member.turns]
    is_sampled = np.concatenate(masks)
    by_id = np.zeros(len(is_sampled))
    by_id[is_sampled] = place_rewards(member, reward).spread(np.asarray(advantages), int(is_sampled.sum()))
    ends = np.cumsum([len(mask) for mask in masks])
    return {turn.end.node: ids for turn, ids in zip(member.turns, np.split(by_id, ends[:-1]), strict=True)}


def _make_unit(
    member: Trajectory,
    by_node: float | dict[int, NDArray[np.float64]],
    use: _RowUse,
    reason: DropReason | TrajectoryStatus,
    counters: Counters,
    *,
    group: str,
    reward: float | None = None,
) -> list[TrajectoryRows]:
    """The member's rows, with one advantage or with one for each id; none if it sampled nothing. It is counted if it
    has none to train.
    """
    if use in (_RowUse.NONE, _RowUse.EMPTY):
        counters.count(Event.DROPPED_ROW, reason)
        return [TrajectoryRows(rows=())] if use is _RowUse.EMPTY else []
    rows = tuple(export_samples(member.tree, by_node))
    if not rows:
        counters.count(Event.DROPPED_ROW, DropReason.NOTHING_SAMPLED)
        return []
    if use is _RowUse.IDLE:
        counters.count(Event.DROPPED_ROW, reason)
        return [TrajectoryRows(rows=(), idle_rows=rows)]
    return [TrajectoryRows(rows=rows, group=group, trajectory=member.trajectory_id, reward=reward)]


def _any_nonzero(of_group: GroupAdvantages) -> bool:
    """Whether a member of the group has an advantage that is not zero."""
    return any(np.any(of_member) for of_member in of_group)
