"""From trajectories to their rows with advantages. A trajectory that gives no row is counted, by reason.

Worked example: five siblings of one problem, GRPO without normalisation.

    trajectory   status      reward   advantage         rows, one per branch
    a            completed   1        1 - 1/2 =  1/2    token_ids 5 6 7 8    loss_mask 0 0 1 1    advantages 0 0 1/2 1/2
    b            completed   0        0 - 1/2 = -1/2    token_ids 5 6 9      loss_mask 0 0 1      advantages 0 0 -1/2
    c            max_turns   0        0 - 1/2 = -1/2    ... (the policy itself ran out of turns)
    d            truncated   1        1 - 1/2 =  1/2    ... (the policy itself ran out of ids)
    e            failed      None     not compared      none, and `dropped_rows/failed` is 1

If a to d all had reward 1, `dropped_rows/no_variance` would be 4. If only a had not failed, there would be no member to
compare it with: `dropped_rows/small_group` would be 1. With a reference, groups of equal rewards and unscored members
are kept for their distance to it: they give rows with the advantage 0 and are not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from unbroken.counters import Counters, Event
from unbroken.errors import InvalidInputError, RewardError
from unbroken.ledger.export import export_samples
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup, TrajectoryStatus
from unbroken.training.objective.advantages import AdvantageFn, StepAdvantages, all_equal, check_rewards
from unbroken.types import TrainingSample

TRAINABLE = frozenset(
    {
        TrajectoryStatus.COMPLETED,
        TrajectoryStatus.TRUNCATED,
        TrajectoryStatus.MAX_TURNS,
        TrajectoryStatus.MAX_TOKENS,
    }
)
"""Endings that the policy itself caused. Failures, aborts and wall-clock timeouts have other causes; what is unscored
cannot be compared."""

MIN_GROUP_SIZE = 2
"""A baseline taken from siblings needs at least one sibling."""


class DropReason(StrEnum):
    """Why a trainable trajectory gives no row; the others are counted under their status."""

    NO_VARIANCE = "no_variance"
    """Every advantage of its group is zero, and there is no reference."""
    SMALL_GROUP = "small_group"
    """Fewer than `MIN_GROUP_SIZE` siblings are left."""
    NOT_PAIRED = "not_paired"
    """Others of its group are in preference pairs, and it is not (online DPO)."""
    NOTHING_SAMPLED = "nothing_sampled"
    """It has no sampled id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRows:
    """The rows of one trajectory, which is trained whole in one update; one that forked has several."""

    rows: tuple[TrainingSample, ...]


def build_samples(
    groups: Sequence[TrajectoryGroup], advantages: AdvantageFn | StepAdvantages, counters: Counters
) -> list[TrainingSample]:
    """The rows of `build_trajectories`, each by itself."""
    return [row for unit in build_trajectories(groups, advantages, counters) for row in unit.rows]


def build_trajectories(
    groups: Sequence[TrajectoryGroup],
    advantages: AdvantageFn | StepAdvantages,
    counters: Counters,
    *,
    keep_zero_advantage: bool = False,
) -> list[TrajectoryRows]:
    """The rows of each trajectory, unscored ones last; counts those that give none under `dropped_rows`, by reason.

    A trajectory counts once, however many branches it has. Members that are not trainable, and groups that are too
    small, do not enter any baseline or deviation. Groups whose advantages are all zero, and unscored members, give rows
    only with `keep_zero_advantage`, for a loss that has other terms.

    Raises:
        RewardError: the reward of a trainable trajectory is not a finite number.
        InvalidInputError: a group was sampled with fewer than two members, or `advantages` does not return one finite
            number per reward.
    """
    also_kept = frozenset({TrajectoryStatus.UNSCORED}) if keep_zero_advantage else frozenset[TrajectoryStatus]()
    kept = [(group.group_id, members) for group in groups if (members := keep_comparable(group, counters, also_kept))]
    rewards = [get_rewards(group_id, members) for group_id, members in kept]
    values = _compute_advantages(rewards, advantages)
    units: list[TrajectoryRows] = []
    for (_, members), of_group in zip(kept, values, strict=True):
        if of_group.any() or keep_zero_advantage:
            units += _export_rows(members, of_group, counters)
        else:
            counters.count(Event.DROPPED_ROW, DropReason.NO_VARIANCE, times=len(members))
    others = [each for group in groups for each in group.trajectories if each.status in also_kept]
    return units + _export_rows(others, np.zeros(len(others)), counters)


def find_zero_variance_members(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    """The trainable members of each group whose rewards are all equal, up to rounding."""
    compared = [members for group in groups if len(members := keep_trainable(group)) >= MIN_GROUP_SIZE]
    return [
        member
        for members in compared
        if all_equal(np.array([each.reward for each in members], dtype=np.float64))
        for member in members
    ]


def keep_trainable(group: TrajectoryGroup) -> list[Trajectory]:
    """The members whose status is in `TRAINABLE`."""
    return [trajectory for trajectory in group.trajectories if trajectory.status in TRAINABLE]


def keep_comparable(
    group: TrajectoryGroup, counters: Counters, also_kept: Collection[TrajectoryStatus] = ()
) -> list[Trajectory]:
    """The members to compare and train on, or an empty list if too few are left; the others are counted.

    Those with a status in `also_kept` are not counted, because the caller trains on them without comparing them.

    Raises `InvalidInputError` if the group was sampled with too few members, so that no step could learn from it.
    """
    if len(group.trajectories) < MIN_GROUP_SIZE:
        raise InvalidInputError(
            f"group {group.group_id} must have at least {MIN_GROUP_SIZE} trajectories, which are compared with each "
            f"other, got {len(group.trajectories)}: sample more of each problem (n of run_group)"
        )
    for trajectory in group.trajectories:
        if trajectory.status not in TRAINABLE and trajectory.status not in also_kept:
            counters.count(Event.DROPPED_ROW, trajectory.status)
    members = keep_trainable(group)
    if len(members) < MIN_GROUP_SIZE:
        counters.count(Event.DROPPED_ROW, DropReason.SMALL_GROUP, times=len(members))
        return []
    return members


def get_rewards(group_id: str, members: Sequence[Trajectory]) -> NDArray[np.float64]:
    """[G] the members' rewards; raises `RewardError` with their names if one is not a finite number."""
    try:
        return check_rewards([member.reward for member in members])
    except RewardError as error:
        ids = ", ".join(member.trajectory_id for member in members)
        raise RewardError(f"group {group_id}, trajectories {ids}: {error}") from error


def _compute_advantages(
    rewards: Sequence[NDArray[np.float64]], advantages: AdvantageFn | StepAdvantages
) -> list[NDArray[np.float64]]:
    returned = advantages.function(rewards) if isinstance(advantages, StepAdvantages) else map(advantages, rewards)
    values = [np.asarray(of_group, dtype=np.float64) for of_group in returned]
    if len(values) != len(rewards):
        raise InvalidInputError(
            f"the advantage function must return one array for each of {len(rewards)} groups, got {len(values)}"
        )
    for of_group, given in zip(values, rewards, strict=True):
        if of_group.shape != given.shape or not np.isfinite(of_group).all():
            raise InvalidInputError(
                f"the advantage function must return {len(given)} finite numbers for rewards {given}, got {of_group}"
            )
    return values


def _export_rows(
    members: Sequence[Trajectory], advantages: NDArray[np.float64], counters: Counters
) -> list[TrajectoryRows]:
    units: list[TrajectoryRows] = []
    for member, advantage in zip(members, advantages, strict=True):
        if rows := export_samples(member.tree, float(advantage)):
            units.append(TrajectoryRows(rows=tuple(rows)))
        else:
            counters.count(Event.DROPPED_ROW, DropReason.NOTHING_SAMPLED)
    return units
