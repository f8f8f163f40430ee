"""Advantages: how much better each trajectory of a group did than its siblings. Rewards [G] -> [G], float64.

A group whose rewards are all equal (up to float64's rounding: `EQUAL_WITHIN`) teaches nothing and gets exact zeros.
Worked example, rewards [1, 0, 0, 1] (mean 1/2, standard deviation 1/2):

    grpo                    [ 1,   -1,   -1,    1  ]
    grpo, normalize=False   [ 1/2, -1/2, -1/2,  1/2]
    rloo                    [ 2/3, -2/3, -2/3,  2/3]     the first: 1 - (0 + 0 + 1) / 3

With a second group in the step, [1, 1], the six rewards have the standard deviation sqrt(2)/3 = 0.471:

    batch_scaled_grpo              [ 1.06, -1.06, -1.06, 1.06], [0, 0]
    reinforce_plus_plus            [ 0.71, -1.41, -1.41, 0.71], [0.71, 0.71]      mean 2/3
    reinforce_plus_plus_baseline   [ 1.22, -1.22, -1.22, 1.22], [0, 0]       deviation of [1/2 -1/2 -1/2 1/2], [0 0]

Two reward functions, each normalised apart:

    gdpo            [1, 0, 0, 1] with weight 1 and [0, 10, 0, 10] with weight 1, in a step without other groups:
                    [1, -1, -1, 1] + [-1, 1, -1, 1] = [0, 0, -2, 2], divided by the deviation sqrt(2) of these
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import RewardError
from unbroken.ledger.numbers import to_finite_float32

Rewards: TypeAlias = Sequence[float | None] | NDArray[Any]
"""[G]; a missing reward (None) is an error."""
EQUAL_WITHIN = 2.0**-48
"""Rewards count as equal if they lie no further apart than this times the largest of their magnitudes: 16 roundings of
float64, in which they are compared as they are given.

Otherwise the difference of 0.1 + 0.2 and 0.3, divided by the standard deviation, would give advantages of 1. A wider
margin would hide rewards that differ: 1e9 and 1e9 + 0.25 were equal within a millionth.
"""
AdvantageFn: TypeAlias = Callable[[Rewards], NDArray[np.float64]]
"""From a group's rewards to its advantages, both [G]."""


class RewardParts(NamedTuple):
    """The rewards of a group before they are summed."""

    values: NDArray[np.float64]
    """[F, G] of F reward functions; NaN where one has no opinion."""
    weights: NDArray[np.float64]
    """[F]"""


@dataclass(frozen=True, slots=True)
class StepAdvantages:
    """An advantage function that needs all groups of a step at once: `StepAdvantages(batch_scaled_grpo)`."""

    function: Callable[[Sequence[Any]], Sequence[NDArray[np.float64]]]
    """From the rewards [G] of each group of all processes to its advantages, in the same order."""
    compares_groups: bool = False
    """Whether a group whose rewards are all equal may have advantages, because its rewards differ from others'."""
    of_parts: bool = False
    """Whether the function gets `RewardParts` instead of sums."""


def grpo_advantages(rewards: Rewards, *, normalize: bool = True) -> NDArray[np.float64]:
    """Reward minus the group's mean, divided by the group's standard deviation (GRPO, arXiv:2402.03300).

    The deviation is the population's (divided by G), so the result has variance one. `normalize=False` omits the
    division (Dr. GRPO, arXiv:2503.20783): groups that are nearly all right or all wrong then weigh less. Raises as
    `check_rewards` does.
    """
    values = check_rewards(rewards)
    centred = _center(values)
    if not normalize or not centred.any():
        return centred
    normalized: NDArray[np.float64] = centred / centred.std()
    return normalized


def batch_scaled_grpo(groups: Sequence[Rewards]) -> list[NDArray[np.float64]]:
    """Reward minus its group's mean, divided by the standard deviation of all rewards of the step.

    (Lite PPO, arXiv:2508.08221.) Divided by its own deviation, a group that is nearly all right weighs as much as one
    that is half right. Divided by the step's, a group weighs as much as its rewards differ, and the rewards' scale does
    not matter. The deviation is the population's, over all groups, those of equal rewards included. Raises as
    `check_rewards` does.
    """
    checked = [check_rewards(rewards) for rewards in groups]
    centred = [_center(values) for values in checked]
    if not any(values.any() for values in centred):
        return centred
    spread = np.concatenate(checked).std()
    return [values / spread for values in centred]


def reinforce_plus_plus(groups: Sequence[Rewards]) -> list[NDArray[np.float64]]:
    """Reward minus the mean of all rewards of the step, divided by their standard deviation (REINFORCE++,
    arXiv:2501.03262), the population's.

    Problems are compared with each other: a group that is all right learns from its being right. Raises as
    `check_rewards` does.
    """
    checked = [check_rewards(rewards) for rewards in groups]
    everything = np.concatenate([np.zeros(0), *checked])
    if len(everything) == 0 or all_equal(everything):
        return [np.zeros_like(values) for values in checked]
    return [(values - everything.mean()) / everything.std() for values in checked]


def _zero_advantages(groups: Sequence[Rewards]) -> list[NDArray[np.float64]]:
    """Nothing, whatever the rewards: for a teacher alone. Raises as `check_rewards` does."""
    return [np.zeros_like(check_rewards(rewards)) for rewards in groups]


def reinforce_plus_plus_baseline(groups: Sequence[Rewards]) -> list[NDArray[np.float64]]:
    """Reward minus its group's mean, divided by the standard deviation of these differences over the step
    (REINFORCE++-baseline, arXiv:2501.03262), the population's. Raises as `check_rewards` does.
    """
    centred = [_center(check_rewards(rewards)) for rewards in groups]
    if not any(values.any() for values in centred):
        return centred
    spread = np.concatenate(centred).std()
    return [values / spread for values in centred]


def gdpo(groups: Sequence[RewardParts]) -> list[NDArray[np.float64]]:
    """Each function's rewards normalised in the group as by `grpo_advantages`, times its weight, and summed; divided by
    the standard deviation of these sums over the step (GDPO, arXiv:2601.05242), the population's.

    Sums of rewards that mean different things can be equal where the rewards are not, and the one with the widest range
    decides. Here only a function's weight counts. One whose rewards are equal in a group adds 0 there, and so does one
    without an opinion on a member, which is normalised over the others.

    The paper subtracts the mean of the step too. It is 0, since each function's advantages have the mean 0 in each
    group; left out, a group in which nothing differs has exact zeros.
    """
    summed = [_sum_normalized(group) for group in groups]
    if not any(values.any() for values in summed):
        return summed
    spread = np.concatenate(summed).std()
    return [values / spread for values in summed]


def _sum_normalized(group: RewardParts) -> NDArray[np.float64]:
    """The weighted sum of each function's normalised rewards, [G]; what only rounding keeps from 0 is 0."""
    weighted = np.zeros_like(group.values)
    for part, values, weight in zip(weighted, group.values, group.weights, strict=True):
        known = ~np.isnan(values)
        if known.any():
            part[known] = weight * grpo_advantages(values[known])
    summed: NDArray[np.float64] = weighted.sum(axis=0)
    # Two functions that cancel each other out would leave their rounding, which the division makes as large as any.
    summed[np.abs(summed) <= EQUAL_WITHIN * np.abs(weighted).sum(axis=0)] = 0.0
    return summed


def rloo_advantages(rewards: Rewards) -> NDArray[np.float64]:
    """Reward minus the mean reward of the *other* trajectories of the group (RLOO, arXiv:2402.14740).

    Raises `RewardError` for a single reward, or as `check_rewards` does.
    """
    values = check_rewards(rewards)
    if len(values) == 1:
        raise RewardError(
            "RLOO compares a trajectory with the others of its group, and this group has 1 reward "
            f"({values[0]}): sample at least 2 trajectories per problem"
        )
    return _center(values) * len(values) / (len(values) - 1)


def check_rewards(rewards: Rewards) -> NDArray[np.float64]:
    """Return `rewards` as float64 [G].

    Raises:
        RewardError: there are no rewards, they are not one-dimensional, or one is not a finite number.
    """
    values = np.asarray(rewards, dtype=object)
    if values.ndim != 1:
        raise RewardError(f"rewards must be one number per trajectory, shape [G], got shape {values.shape}")
    if len(values) == 0:
        raise RewardError("rewards must hold at least one number, got none")
    checked = [to_finite_float32(value, name=f"rewards[{k}]", error=RewardError) for k, value in enumerate(values)]
    return np.array(checked, dtype=np.float64)


def all_equal(values: NDArray[np.float64]) -> bool:
    """Whether the rewards of a group differ by no more than the rounding of float64."""
    return bool(values.max() - values.min() <= EQUAL_WITHIN * np.abs(values).max())


def _center(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Subtract the mean; equal values give exact zeros."""
    if all_equal(values):
        return np.zeros_like(values)
    centred: NDArray[np.float64] = values - values.mean()
    return centred


TurnRewards: TypeAlias = NDArray[np.float64]
"""[K] the rewards of one trajectory's turns, or of its spans."""


@dataclass(frozen=True, slots=True)
class TurnAdvantages:
    """An advantage function for turns, for environments that give rewards for single turns (`Continue.reward`), and for
    spans of ids, for reward functions that give rewards for these (process rewards).

    A trajectory's rewards are those of its turns, [K] for K turns. What it is rewarded for in the end belongs to its
    last turn. Worked example, two siblings of 2 and 1 turns with the rewards [0, 1] and [0]:

        turn_returns    returns [1, 1] and [0]; means of the turns 1/2 and, over both, 1/2     [1/2, 1/2], [-1/2]
        turn_grpo       mean 1/3, deviation sqrt(2)/3; normalised -0.71, 1.41 and -0.71        [0.71, 1.41], [-0.71]

    A sibling that has ended has the return 0 in the turns that it did not play.

    With spans each reward stands at the end of its span, and an id has the advantage of the first one that stands at it
    or after it; after the last, 0. Rewards that stand at the same end are one, and where there are spans, turns or the
    whole trajectory count only if something rewards them.
    """

    function: Callable[[Sequence[TurnRewards]], Sequence[NDArray[np.float64]]]
    """From the turns' rewards of each member of a group to their advantages, of the same lengths."""


def turn_grpo(members: Sequence[TurnRewards]) -> list[NDArray[np.float64]]:
    """GRPO with process supervision (arXiv:2402.03300, section 4.1.3): all rewards of the group's turns or spans, minus
    their mean and divided by their standard deviation; a turn's advantage is the sum of its own and of all later ones.

    The deviation is the population's.
    """
    everything = np.concatenate(members)
    if len(everything) == 0 or all_equal(everything):
        return [np.zeros_like(rewards) for rewards in members]
    mean, spread = everything.mean(), everything.std()
    return [_sum_to_go((rewards - mean) / spread) for rewards in members]


def turn_returns(members: Sequence[TurnRewards]) -> list[NDArray[np.float64]]:
    """A turn's return, the sum of its reward and of all later ones, minus the mean return of all siblings at that turn.

    REINFORCE with a baseline that depends on the turn (Sutton and Barto, section 13.4), estimated from the siblings.
    """
    returns = [_sum_to_go(rewards) for rewards in members]
    longest = max(len(of_member) for of_member in returns)
    padded = np.array([np.pad(of_member, (0, longest - len(of_member))) for of_member in returns])
    centred = [np.zeros(len(padded)) if all_equal(turn) else turn - turn.mean() for turn in padded.T]
    return [np.array([turn[i] for turn in centred[: len(rewards)]]) for i, rewards in enumerate(members)]


def _sum_to_go(rewards: TurnRewards) -> NDArray[np.float64]:
    summed: NDArray[np.float64] = np.cumsum(rewards[::-1])[::-1]
    return summed


Advantages: TypeAlias = AdvantageFn | StepAdvantages | TurnAdvantages
ADVANTAGES: Mapping[str, Advantages] = {
    "grpo": grpo_advantages,
    "dr_grpo": partial(grpo_advantages, normalize=False),
    "rloo": rloo_advantages,
    "batch_scaled_grpo": StepAdvantages(batch_scaled_grpo),
    "reinforce_plus_plus": StepAdvantages(reinforce_plus_plus, compares_groups=True),
    "reinforce_plus_plus_baseline": StepAdvantages(reinforce_plus_plus_baseline),
    "gdpo": StepAdvantages(gdpo, of_parts=True),
    "zero": StepAdvantages(_zero_advantages, compares_groups=True),
    "turn_grpo": TurnAdvantages(turn_grpo),
    "turn_returns": TurnAdvantages(turn_returns),
}
"""The names of `unbroken train --advantages`."""
