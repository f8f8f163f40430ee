"""Rows that begin with the same ids, as those of trees and of siblings do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from support.rows import row
from unbroken.training.objective.pairs import PreferencePair
from unbroken.training.objective.samples import TrajectoryRows
from unbroken.types import TrainingSample


def branching_rows(
    rng: np.random.Generator, num_rows: int, *, vocab_size: int = 64, longest: int = 20
) -> list[TrainingSample]:
    """Rows that leave each other anywhere, some at their first id or at their end, and rows that are equal."""
    ids: list[NDArray[np.int32]] = []
    for _ in range(num_rows):
        other = ids[int(rng.integers(len(ids)))] if ids else np.zeros(0, dtype=np.int32)
        kept = other[: int(rng.integers(len(other) + 1))]
        own = rng.integers(0, vocab_size, int(rng.integers(0, max(1, longest - len(kept)) + 1)))
        ids.append(np.concatenate([kept, own, rng.integers(0, vocab_size, max(0, 2 - len(kept) - len(own)))]))
    return [_train(rng, each.tolist()) for each in ids]


def branching_pairs(rng: np.random.Generator, num_pairs: int) -> list[PreferencePair]:
    """Pairs whose two rows begin with one prompt."""
    pairs = []
    for _ in range(num_pairs):
        prompt = rng.integers(0, 64, 10).tolist()
        sides = [_train(rng, [*prompt, *rng.integers(0, 64, int(rng.integers(2, 6)))], since=10) for _ in range(2)]
        chosen, rejected = (
            (replace(side, advantages=sign * side.loss_mask),) for side, sign in zip(sides, (1, -1), strict=True)
        )
        pairs.append(PreferencePair(chosen=chosen, rejected=rejected, score_margin=1.0))
    return pairs


def branching_trajectories(rng: np.random.Generator, num_trajectories: int) -> list[TrajectoryRows]:
    """Trajectories of one to three rows each, all of one problem."""
    rows = branching_rows(rng, 3 * num_trajectories)
    units = []
    for number in range(num_trajectories):
        of_unit = rows[3 * number : 3 * number + int(rng.integers(1, 4))]
        advantage = float(rng.normal())
        signed = tuple(replace(each, advantages=np.where(each.loss_mask, advantage, 0)) for each in of_unit)
        units.append(TrajectoryRows(rows=signed, group="g", reward=float(rng.normal())))
    return units


def _train(rng: np.random.Generator, ids: list[int], *, since: int = 1) -> TrainingSample:
    """A row in which some ids were sampled."""
    sampled = since + np.flatnonzero(rng.random(len(ids) - since) < 0.6)
    sampled = sampled if len(sampled) else np.array([len(ids) - 1])
    advantage, logprob = float(rng.normal()), float(-4 + rng.normal())
    return row(ids, sampled=sampled.tolist(), advantage=advantage, logprob=logprob)
