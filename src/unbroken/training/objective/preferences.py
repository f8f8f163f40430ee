"""Which members of a group make preference pairs, by their scores.

Two members make a pair if their scores differ by more than rounding (`EQUAL_WITHIN`, as for advantages).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import RewardError
from unbroken.training.objective.advantages import EQUAL_WITHIN, Rewards, check_rewards

PairFn: TypeAlias = Callable[[Rewards], Sequence[tuple[int, int]]]
"""The scores of a group [G] to pairs of its members: the preferred one, then the rejected one."""


def best_and_worst(scores: Rewards) -> list[tuple[int, int]]:
    """One pair, of the best and the worst; no pair if all scores are equal, which teaches nothing.

    Of equals the first is taken: [1, 3, 0, 3] gives [(1, 2)].

    Raises:
        RewardError: `scores` is not a non-empty list of finite numbers.
    """
    values = check_rewards(scores)
    return _drop_ties([(int(values.argmax()), int(values.argmin()))], values)


def outside_in(scores: Rewards) -> list[tuple[int, int]]:
    """The best with the worst, the second best with the second worst, and so on, as long as they differ.

    Each member is in one pair at most. Worked example: of [1, 0, 1, 1, 0] the pairs are (0, 4) and (2, 1).

    Raises:
        RewardError: `scores` is not a non-empty list of finite numbers.
    """
    values = check_rewards(scores)
    order = np.argsort(-values, kind="stable").tolist()
    return _drop_ties(list(zip(order, reversed(order), strict=True))[: len(order) // 2], values)


def scores_of_ranking(ranking: Sequence[int]) -> list[float]:
    """Scores in the order of a ranking; `ranking` has the members' indices, best first.

    Worked example: [2, 0, 1] puts the third member first, and gives the scores [1, 0, 2].

    Raises:
        RewardError: `ranking` does not name each member once.
    """
    if sorted(ranking) != list(range(len(ranking))):
        raise RewardError(f"a ranking must name each of {len(ranking)} members once, by index, got {list(ranking)}")
    places = {member: place for place, member in enumerate(ranking)}
    return [float(len(ranking) - 1 - places[member]) for member in range(len(ranking))]


def _drop_ties(pairs: Sequence[tuple[int, int]], values: NDArray[np.float64]) -> list[tuple[int, int]]:
    tolerance = EQUAL_WITHIN * np.abs(values).max()
    return [(better, worse) for better, worse in pairs if values[better] - values[worse] > tolerance]
