"""The order of rows: row k of a run is row `order(k // n)[k % n]` of the n rows.

Each epoch has its own order, which depends only on the seed and the epoch. So one number says where a run is.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray


class EpochOrder:
    """The order of `num_rows` rows, in epochs without end."""

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
