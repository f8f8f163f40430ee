"""Fit times to what a run measured, by least squares without negative times."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unbroken.simulation.config import EngineTimes

_LEAST_GAIN = 0.01
"""A further time must explain this share of what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRollout:
    """A rollout that a run has recorded."""

    step: int
    lengths: Sequence[int]
    """Sampled ids of each turn; one turn or more."""
    seconds: float


def fit_times(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The factors of `columns`, K of N numbers each, whose sum is closest to `seconds`, none of them negative.

    A column that explains nothing more than those before it gets the factor 0.
    """
    table, target = np.asarray(columns, dtype=np.float64).T, np.asarray(seconds, dtype=np.float64)
    best, least = [0.0] * len(columns), float((target**2).sum())
    for size in range(1, len(columns) + 1):
        for chosen in itertools.combinations(range(len(columns)), size):
            factors = _solve(table[:, chosen], target)
            left = float(((table[:, chosen] @ factors - target) ** 2).sum())
            if (factors >= 0).all() and left < least * (1 - _LEAST_GAIN):
                least = left
                best = [0.0] * len(columns)
                for index, factor in zip(chosen, factors.tolist(), strict=True):
                    best[index] = factor
    return best


def fit_engine(rollouts: Sequence[MeasuredRollout], *, num_together: float | None) -> EngineTimes:
    """Times of an engine: of a turn, of an id, and, with `num_together`, of an id for each other request.

    `num_together` rollouts of one turn each begin at the same time in every step. Then a rollout of n ids waits for the
    sum of min(n, m) ids over all of them, m being theirs: short ones have left the engine by then.
    """
    columns: list[Sequence[float]] = [
        [len(each.lengths) for each in rollouts],
        [sum(each.lengths) for each in rollouts],
    ]
    if num_together is not None and all(len(each.lengths) == 1 for each in rollouts):
        columns.append(_count_shared_ids(rollouts, num_together))
    first_s, id_s, *more = fit_times(columns, [each.seconds for each in rollouts])
    if id_s + sum(more) == 0:  # rollouts are all as long
        return EngineTimes(id_s=sum(each.seconds for each in rollouts) / sum(columns[1]))
    return EngineTimes(first_s=first_s, id_s=id_s, id_s_per_request=sum(more))


def _count_shared_ids(rollouts: Sequence[MeasuredRollout], num_together: float) -> list[float]:
    """For each rollout, the ids of all rollouts of its step up to its own length; few of them may be recorded."""
    by_step: dict[int, list[int]] = defaultdict(list)
    for each in rollouts:
        by_step[each.step] += each.lengths
    return [
        float(np.minimum(by_step[each.step], each.lengths[0]).sum()) * num_together / len(by_step[each.step])
        for each in rollouts
    ]


def _solve(table: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.lstsq(table, target, rcond=None)[0], dtype=np.float64)
