"""From the rewards of groups to advantages, by any of the three kinds of functions, over all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import InvalidInputError, TrainingError
from unbroken.rollout.trajectory import Trajectory
from unbroken.training.objective.advantages import (
    Advantages,
    RewardParts,
    StepAdvantages,
    TurnAdvantages,
    TurnRewards,
)

GroupAdvantages: TypeAlias = Sequence[float | NDArray[np.float64]]
"""For each member of a group one number, or one for each of its `_PlacedRewards`."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that train together, for what all of their groups decide."""

    index: int = 0
    """This one's."""
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    """The values of all processes, in their order. Every process calls it equally often."""


ALONE = Processes()
MIN_GROUP_SIZE = 2
"""A baseline taken from siblings needs at least one sibling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedGroup:
    """The members of a group that are compared with each other, and what they are compared by."""

    name: str
    rewards: NDArray[np.float64]
    """[G]"""
    members: Sequence[Trajectory] = ()
    """[G]; only for advantages of turns and of parts of rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ComparedGroups:
    """The groups of one process and their advantages."""

    groups: Sequence[ComparedGroup]
    advantages: Sequence[GroupAdvantages]
    """In the order of the groups."""


def get_min_group_size(advantages: Advantages) -> int:
    """How many siblings a group needs: one if the advantages compare groups with each other."""
    compares_groups = isinstance(advantages, StepAdvantages) and advantages.compares_groups
    return 1 if compares_groups else MIN_GROUP_SIZE


def compute_advantages(
    compare: Callable[[], Sequence[ComparedGroup]], advantages: Advantages, processes: Processes = ALONE
) -> _ComparedGroups:
    """The groups that `compare` returns, and their members' advantages.

    `StepAdvantages` wait for the other processes. If `compare` fails in one, the error is raised there, and a
    `TrainingError` with its text on the others.

    Raises:
        InvalidInputError: the function does not return one finite number per reward, or no trajectory has rewards of
            turns, which the function needs.
    """
    if isinstance(advantages, StepAdvantages):
        return _compute_over_step(compare, advantages, processes)
    compared = compare()
    values: list[GroupAdvantages]
    if isinstance(advantages, TurnAdvantages):
        _check_turns(compared)
        values = [
            compute_turns(
                [place_rewards(*each).rewards for each in zip(group.members, group.rewards, strict=True)], advantages
            )
            for group in compared
        ]
    else:
        values = [_check(advantages(group.rewards), group.rewards).tolist() for group in compared]
    return _ComparedGroups(groups=compared, advantages=values)


class _PlacedRewards(NamedTuple):
    """The rewards of a trajectory, each where it stands."""

    ends: NDArray[np.int64]
    """[K] ascending: after how many sampled ids, of all turns."""
    rewards: TurnRewards

    def spread(self, advantages: NDArray[np.float64], num_ids: int) -> NDArray[np.float64]:
        """[num_ids] the advantage of each sampled id: that of the first reward at it or after it; none is 0.

        Ends [2, 5] with the advantages [1, -1] and 6 ids: [1, 1, -1, -1, -1, 0].
        """
        places = np.searchsorted(self.ends, np.arange(num_ids), side="right")
        return np.append(advantages, 0.0)[places]


def place_rewards(member: Trajectory, reward: float) -> _PlacedRewards:
    """The rewards of a member's turns, or of its spans; what remains of its `reward` belongs to the last id."""
    ends = np.cumsum([turn.sequence.num_sampled for turn in member.turns], dtype=np.int64)
    if member.span_rewards:
        return _place_spans(member, ends.tolist(), lost=reward - (member.reward or 0.0))
    rewards = np.array(member.turn_rewards or [0.0] * len(member.turns), dtype=np.float64)
    if len(rewards):
        rewards[-1] += reward - sum(member.turn_rewards)
    return _PlacedRewards(ends, rewards)


def _place_spans(member: Trajectory, turn_ends: Sequence[int], *, lost: float) -> _PlacedRewards:
    """`lost` is what the comparison takes from the reward (`OverlongConfig`), as a number <= 0."""
    given = [(span.stop, span.reward) for span in member.span_rewards]
    given += zip(turn_ends, member.turn_rewards, strict=True) if member.turn_rewards else ()
    given += [(turn_ends[-1], lost)] if lost else ()
    placed: dict[int, float] = {}
    for end, reward in sorted(given):
        placed[end] = placed.get(end, 0.0) + reward
    return _PlacedRewards(np.array([*placed], dtype=np.int64), np.array([*placed.values()], dtype=np.float64))


def get_parts(group: ComparedGroup) -> RewardParts:
    """The rewards of a group before they are summed; raises `InvalidInputError` if they are no weighted sums."""
    if not group.members:  # a trial: one function
        return RewardParts(group.rewards[None], np.ones(1))
    weights = group.members[0].reward_weights
    if not weights or any(member.reward_weights != weights for member in group.members):
        raise InvalidInputError(
            "advantages of parts of rewards (gdpo) need a reward that is a weighted sum of functions ([[rewards]]), "
            f"and group {group.name} has {'several' if weights else 'none'}: parts of an environment have no weights"
        )
    values = [[member.reward_parts.get(name, np.nan) for member in group.members] for name in weights]
    return RewardParts(np.array(values, dtype=np.float64), np.array([*weights.values()], dtype=np.float64))


def _compare_together(
    compare: Callable[[], Sequence[ComparedGroup]], processes: Processes, *, of_parts: bool
) -> tuple[Sequence[ComparedGroup], list[Sequence[Any]]]:
    """The groups of this process, and the rewards of those of each process. One that fails still takes part, or the
    others would wait for it forever; then all raise.
    """
    rewards: Sequence[Any] = ()
    compared: Sequence[ComparedGroup] = ()
    failure: Exception | None = None
    try:
        compared = compare()
        rewards = [get_parts(group) if of_parts else group.rewards for group in compared]
    except Exception as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    everyone = processes.gather((rewards, text))
    if failure is not None:
        raise failure
    for process, (_, problem) in enumerate(everyone):
        if problem is not None:
            raise TrainingError(f"process {process} failed: {problem}")
    return compared, [of_process for of_process, _ in everyone]


def _compute_over_step(
    compare: Callable[[], Sequence[ComparedGroup]], advantages: StepAdvantages, processes: Processes
) -> _ComparedGroups:
    compared, everyone = _compare_together(compare, processes, of_parts=advantages.of_parts)
    groups = [(process, rewards) for process, of_process in enumerate(everyone) for rewards in of_process]
    returned = list(advantages.function([rewards for _, rewards in groups]))
    if len(returned) != len(groups):
        raise InvalidInputError(
            f"the advantage function must return one array for each of {len(groups)} groups, got {len(returned)}"
        )
    mine = [values for (process, _), values in zip(groups, returned, strict=True) if process == processes.index]
    checked = [_check(values, group.rewards).tolist() for values, group in zip(mine, compared, strict=True)]
    return _ComparedGroups(groups=compared, advantages=checked)


def _check_turns(groups: Sequence[ComparedGroup]) -> None:
    members = [member for group in groups for member in group.members]
    if members and not any(member.turn_rewards or member.span_rewards for member in members):
        raise InvalidInputError(
            f"advantages of turns need trajectories with turn_rewards, and the {len(members)} of this step have none: "
            "the environment must return Continue(..., reward=...) or Done(reward=...), with 0 for turns that earn "
            "nothing; or a reward function must return rewards of spans"
        )


def compute_turns(given: Sequence[TurnRewards], advantages: TurnAdvantages) -> GroupAdvantages:
    """The advantages of the turns of a group's members; raises as `compute_advantages`."""
    returned = list(advantages.function(given))
    if len(returned) != len(given):
        raise InvalidInputError(
            f"the advantage function must return one array for each of {len(given)} trajectories, got {len(returned)}"
        )
    return [_check(values, rewards) for values, rewards in zip(returned, given, strict=True)]


def _check(returned: Any, given: NDArray[np.float64]) -> NDArray[np.float64]:
    try:
        values = np.asarray(returned, dtype=np.float64)
    except (TypeError, ValueError):  # text, or lists of several lengths
        values = np.full(1 + len(given), np.nan)
    if values.shape != given.shape or not np.isfinite(values).all():
        raise InvalidInputError(
            f"the advantage function must return {len(given)} finite numbers for rewards {given}, got {returned}"
        )
    return values
