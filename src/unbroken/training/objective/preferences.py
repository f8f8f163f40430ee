"""Preference pairs from the scores of a group, which must differ by more than rounding (`EQUAL_WITHIN`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import RewardError
from unbroken.training.objective.advantages import EQUAL_WITHIN, Rewards, check_rewards

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
