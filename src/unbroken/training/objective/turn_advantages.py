"""Advantages for each turn, for environments that give rewards for single turns (`Continue.reward`).

A trajectory's rewards are those of its turns, [K] for K turns. What it is rewarded for in the end belongs to its last
turn. Worked example, two siblings of 2 and 1 turns with the rewards [0, 1] and [0]:

    turn_returns    returns [1, 1] and [0]; means of the turns 1/2 and, over both, 1/2     [1/2, 1/2], [-1/2]
    turn_grpo       mean 1/3, deviation sqrt(2)/3; normalised -0.71, 1.41 and -0.71        [0.71, 1.41], [-0.71]

A sibling that has ended has the return 0 in the turns that it did not play.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from unbroken.training.objective.advantages import all_equal

TurnRewards: TypeAlias = NDArray[np.float64]
"""[K] the rewards of one trajectory's turns."""


@dataclass(frozen=True, slots=True)
class TurnAdvantages:
    """An advantage function for turns: `TurnAdvantages(turn_grpo)`."""

    function: Callable[[Sequence[TurnRewards]], Sequence[NDArray[np.float64]]]
    """From the turns' rewards of each member of a group to their advantages, of the same lengths."""


def turn_grpo(members: Sequence[TurnRewards]) -> list[NDArray[np.float64]]:
    """GRPO with process supervision (arXiv:2402.03300, section 4.1.3): all rewards of the group's turns, minus their
    mean and divided by their standard deviation; a turn's advantage is the sum of its own and of all later ones.

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
