"""Keeps each conversation on one data-parallel rank, whose prefix cache has its earlier turns.

vLLM itself sends every request to the rank with the fewest, wherever the prefix is cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

_MAX_SESSIONS = 65_536


class RankAffinity:
    """Chooses ranks: a new session gets the rank with the fewest requests of sessions in flight, and keeps it."""

    def __init__(self, num_ranks: int) -> None:
        self._num_in_flight = [0] * num_ranks
        self._num_sessions = [0] * num_ranks
        self._ranks: OrderedDict[str, int] = OrderedDict()
        """By session, the least recently used one first."""

    @contextmanager
    def choose(self, session_id: str | None) -> Iterator[int | None]:
        """The rank of a request while it runs; None leaves the choice to vLLM."""
        if session_id is None or len(self._num_in_flight) == 1:
            yield None
            return
        rank = self._find(session_id)
        self._num_in_flight[rank] += 1
        try:
            yield rank
        finally:
            self._num_in_flight[rank] -= 1

    def _find(self, session_id: str) -> int:
        if session_id not in self._ranks:
            ranks = range(len(self._num_in_flight))
            rank = min(ranks, key=lambda rank: (self._num_in_flight[rank], self._num_sessions[rank]))
            self._ranks[session_id] = rank
            self._num_sessions[rank] += 1
            if len(self._ranks) > _MAX_SESSIONS:
                _, dropped = self._ranks.popitem(last=False)
                self._num_sessions[dropped] -= 1
        self._ranks.move_to_end(session_id)
        return self._ranks[session_id]
