"""Random numbers by seeds: those of the parts of a run, no two of which draw the same, and the order of its rows."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray


def derive_seed(seed: int | None, *place: int) -> int | None:
    """Derive the seed of a part (a sibling, a turn) from that of the whole; None stays None."""
    return None if seed is None else int(np.random.SeedSequence([seed, *place]).generate_state(1)[0])


def derive_problem_seed(seed: int, split: str, number: int) -> int:
    """Derive the seed of problem `number` of a split (`train`, `evaluation`, ...) of a run, from 0 to 2^31 - 1."""
    return int(np.random.SeedSequence([seed, number, *split.encode()]).generate_state(1)[0]) >> 1


class EpochOrder:
    """The order of `num_rows` rows, in epochs without end: row k of a run is row `order(k // n)[k % n]` of the n rows.

    Each epoch has its own order, which depends only on the seed and the epoch. So one number says where a run is.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool) -> None:
        """Without `shuffle`, every epoch has the order of the rows."""
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._order = functools.lru_cache(maxsize=2)(self._order_of)

    def index(self, number: int) -> int:
        """The index of row `number` of the run."""
        epoch, place = divmod(number, self._num_rows)
        return int(self._order(epoch)[place])

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self._num_rows)
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_rows)
