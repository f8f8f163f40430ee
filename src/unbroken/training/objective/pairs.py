"""From trajectories to preference pairs for online DPO. Trajectories in no pair are counted, by reason.

Worked example: five siblings of one problem, paired by `best_and_worst`.

    trajectory   status      score
    a            completed   1        chosen: its rows, one per branch, with advantages 1
    b            completed   0        rejected: its rows, with advantages -1
    c            completed   1        in no pair: `dropped_rows/not_paired`
    d            truncated   0.5      in no pair: `dropped_rows/not_paired`
    e            failed      None     not compared: `dropped_rows/failed`

If a to d had the same score, `dropped_rows/no_variance` would be 4.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from unbroken.counters import Counters, Event
from unbroken.errors import InvalidInputError, RewardError
from unbroken.ledger.tree import export_samples
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.training.objective.advantages import EQUAL_WITHIN, Rewards, check_rewards
from unbroken.training.objective.comparison import MIN_GROUP_SIZE
from unbroken.training.objective.samples import DropReason, get_rewards, keep_comparable
from unbroken.types import TrainingSample

PairFn: TypeAlias = Callable[[Rewards], Sequence[tuple[int, int]]]
"""From the scores of a group [G] to pairs of its members: the preferred one, then the rejected one."""


def best_and_worst(scores: Rewards) -> list[tuple[int, int]]:
    """One pair, of the best and the worst, the first of equals; no pair if all scores are equal.

    Worked example: [1, 3, 0, 3] gives [(1, 2)]. Raises as `check_rewards` does.
    """
    values = check_rewards(scores)
    return _drop_ties([(int(values.argmax()), int(values.argmin()))], values)


def outside_in(scores: Rewards) -> list[tuple[int, int]]:
    """The best with the worst, the second best with the second worst, and so on, as long as they differ.

    Worked example: [1, 0, 1, 1, 0] gives (0, 4) and (2, 1). Raises as `check_rewards` does.
    """
    values = check_rewards(scores)
    order = np.argsort(-values, kind="stable").tolist()
    return _drop_ties(list(zip(order, reversed(order), strict=True))[: len(order) // 2], values)


def scores_of_ranking(ranking: Sequence[int]) -> list[float]:
    """Scores for a ranking of the members' indices, best first: [2, 0, 1] gives [1, 0, 2].

    Raises `RewardError` unless `ranking` names each member once.
    """
    if sorted(ranking) != list(range(len(ranking))):
        raise RewardError(f"a ranking must name each of {len(ranking)} members once, by index, got {list(ranking)}")
    places = {member: place for place, member in enumerate(ranking)}
    return [float(len(ranking) - 1 - places[member]) for member in range(len(ranking))]


def _drop_ties(pairs: Sequence[tuple[int, int]], values: NDArray[np.float64]) -> list[tuple[int, int]]:
    tolerance = EQUAL_WITHIN * np.abs(values).max()
    return [(better, worse) for better, worse in pairs if values[better] - values[worse] > tolerance]


Judge: TypeAlias = Callable[[Sequence[Trajectory]], Awaitable[Sequence[float]]]
"""From the members of a group to one score each, higher is better; equal scores make no pair. To rank instead, return
`scores_of_ranking(ranking)`. Groups are judged concurrently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """Two trajectories of one problem, the first preferred to the second.

    A trajectory that forked has several rows. Each sampled id is in the loss mask of exactly one of them, so the
    trajectory's logprob is the sum over all their loss masks.
    """

    chosen: tuple[TrainingSample, ...]
    """With the advantage 1 on loss tokens."""
    rejected: tuple[TrainingSample, ...]
    """With the advantage -1 on loss tokens."""
    score_margin: float
    """The chosen score minus the rejected one; above 0."""

    def __post_init__(self) -> None:
        if not self.score_margin > 0:
            raise InvalidInputError(f"PreferencePair.score_margin must be > 0, got {self.score_margin}")
        for name, rows, sign in (("chosen", self.chosen, 1), ("rejected", self.rejected, -1)):
            if not rows or any((row.advantages != sign * row.loss_mask).any() for row in rows):
                raise InvalidInputError(
                    f"PreferencePair.{name} must be at least one row with the advantage {sign} on all loss tokens, got "
                    f"{len(rows)} rows with {[sorted(set(row.advantages.tolist())) for row in rows]}"
                )

    @property
    def rows(self) -> tuple[TrainingSample, ...]:
        """All rows, the chosen ones first."""
        return self.chosen + self.rejected


async def build_pairs(
    groups: Sequence[TrajectoryGroup], counters: Counters, *, judge: Judge | None, pairs: PairFn
) -> list[PreferencePair]:
    """The pairs of all groups, in order; counts each trajectory that is in no pair under `dropped_rows`, by reason.

    Members that failed, were aborted or sampled nothing are neither scored nor paired. Without a `judge` the
    rewards are the scores.

    Raises:
        RewardError: the rewards or the judge's scores are not one finite number for each member.
        InvalidInputError: a group was sampled with fewer than two members, or `pairs` did not return pairs of
            members, the better one first.
    """
    kept = [(group.group_id, members) for group in groups if (members := _keep_members_with_ids(group, counters))]
    scores = await asyncio.gather(*(_score_group(group_id, members, judge) for group_id, members in kept))
    return [
        pair
        for (_, members), of_group in zip(kept, scores, strict=True)
        for pair in _pair_members(members, of_group, pairs, counters)
    ]


def _keep_members_with_ids(group: TrajectoryGroup, counters: Counters) -> list[Trajectory]:
    members = keep_comparable(group, counters)
    found = [member for member in members if member.tree.rows]
    counters.count(Event.DROPPED_ROW, DropReason.NOTHING_SAMPLED, times=len(members) - len(found))
    if len(found) < MIN_GROUP_SIZE:
        counters.count(Event.DROPPED_ROW, DropReason.SMALL_GROUP, times=len(found))
        return []
    return found


async def _score_group(group_id: str, members: Sequence[Trajectory], judge: Judge | None) -> NDArray[np.float64]:
    if judge is None:
        return get_rewards(group_id, members)
    judged = await judge(members)
    try:
        scores = check_rewards(judged)
    except RewardError as error:
        raise RewardError(f"the judge's scores of group {group_id}: {error}") from error
    if len(scores) != len(members):
        raise RewardError(
            f"the judge must return one score for each of {len(members)} members of group {group_id}, got {len(scores)}"
        )
    return scores


def _pair_members(
    members: Sequence[Trajectory], scores: NDArray[np.float64], pairs: PairFn, counters: Counters
) -> list[PreferencePair]:
    chosen = pairs(scores)
    for pair in chosen:
        if not all(0 <= member < len(members) for member in pair) or not scores[pair[0]] > scores[pair[1]]:
            raise InvalidInputError(
                f"OnlineDpo.pairs must return pairs of indices, the one with the higher score first, got {pair} for "
                f"the scores {scores}"
            )
    reason = DropReason.NOT_PAIRED if chosen else DropReason.NO_VARIANCE
    paired = {member for pair in chosen for member in pair}
    counters.count(Event.DROPPED_ROW, reason, times=len(members) - len(paired))
    return [
        PreferencePair(
            chosen=tuple(export_samples(members[better].tree, 1.0)),
            rejected=tuple(export_samples(members[worse].tree, -1.0)),
            score_margin=float(scores[better] - scores[worse]),
        )
        for better, worse in chosen
    ]
