"""The table of slots: ids, lengths and parameters of all rows as arrays, and the prefix cache.

A slot is *running* while a row samples in it, and idle otherwise. An idle slot keeps the ids whose keys and values it
still holds until another row needs the slot, least recently used first. These are the prefix cache.

    slot  ids                       num_cached  length
    0     p p p p s s . . . . . .   5           6        running: the last sampled id is fed in the next step
    1     p p p s s s s s . . . .   7           7        idle: the next turn of that conversation feeds from 7 on
    2     . . . . . . . . . . . .   0           0        idle and empty

Shapes: S slots, N positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unbroken.engines.transformers.sampling import PARAMS_DTYPE, pack_params
from unbroken.types import RoutedExperts, SamplingParams, TokenIds

_MIN_CAPACITY = 64
_MAX_SPARE = 2**21
"""Positions of all slots up to which slots are added only to keep prefixes: to copy more takes seconds."""
"""Positions of the first slots; they double from there."""
MIN_COPY = 16
"""Fewer common ids than this are recomputed instead of copied from another slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A slot for a new row, and the part of its prompt that is cached."""

    slot: int
    num_cached: int
    """Ids of the prompt that need not be computed; never the last one, which gives the first logits."""
    copy_from: int
    """The slot whose first `num_cached` positions must be copied; `slot` itself if they are in place."""


class SlotTable:
    """The rows' state as arrays over slots. It holds no tensors: the caller copies keys and values."""

    def __init__(self, *, max_slots: int, context_length: int, experts: RoutedExperts | None = None) -> None:
        """`experts` is [0, 0, L, K] if they are recorded."""
        self._max_slots = max_slots
        self._context_length = context_length
        self._clock = 0
        self.ids = np.zeros((0, 0), dtype=np.int32)
        """[S, N] prompt and completion."""
        self.logprobs = np.zeros((0, 0), dtype=np.float32)
        """[S, N] logprobs of the sampled ids."""
        self.num_cached = np.zeros(0, dtype=np.int64)
        """[S] leading ids whose keys and values are stored."""
        self.length = np.zeros(0, dtype=np.int64)
        """[S] ids known."""
        self.limit = np.zeros(0, dtype=np.int64)
        """[S] the length at which a running row ends."""
        self.running = np.zeros(0, dtype=np.bool_)
        self.params = np.zeros(0, dtype=PARAMS_DTYPE)
        self.adapters = np.zeros(0, dtype=np.int64)
        """[S] the number of the adapter that computed the cached ids, and computes the others."""
        self._last_used = np.zeros(0, dtype=np.int64)
        self._experts = experts
        """[S, N, L, K] those that computed the keys and values of the cached ids."""

    @property
    def num_slots(self) -> int:
        """Number of slots now; it doubles up to the maximum before an idle slot is reused."""
        return len(self.length)

    @property
    def capacity(self) -> int:
        """Number of positions in each slot."""
        return int(self.ids.shape[1])

    @property
    def has_room(self) -> bool:
        """Whether another row can be claimed."""
        return self.num_slots < self._max_slots or not self.running.all()

    def claim(self, prompt_ids: TokenIds, params: SamplingParams, *, adapter: int = 0) -> Claim:
        """Make a slot run with this prompt, reusing the longest prefix that any slot of this adapter holds. Needs
        `has_room`.
        """
        source, common = self._longest_prefix(prompt_ids, adapter)
        in_place = common > 0 and not self.running[source] and common == self.num_cached[source]
        if not in_place and common < MIN_COPY:
            common = 0
        slot = source if in_place else self._free_slot()
        if common == 0:
            source = slot
        self.reserve(len(prompt_ids) + 1)
        self.ids[slot, : len(prompt_ids)] = prompt_ids
        self.num_cached[slot] = common
        self.length[slot] = len(prompt_ids)
        self.limit[slot] = min(len(prompt_ids) + params.max_tokens, self._context_length)
        self.running[slot] = True
        self.params[slot] = pack_params(params)
        self.adapters[slot] = adapter
        return Claim(slot=slot, num_cached=common, copy_from=source)

    def release(self, slot: int) -> None:
        """End the row of a slot; its cache stays for later prompts."""
        self._clock += 1
        self.running[slot] = False
        self._last_used[slot] = self._clock
        self.length[slot] = self.num_cached[slot]

    def forget(self, *, running: bool) -> None:
        """Drop the cache of idle slots, and with `running` that of running ones, which compute theirs again."""
        slots = np.ones_like(self.running) if running else ~self.running
        self.num_cached[slots] = 0
        self.length[~self.running] = 0
        self._last_used[~self.running] = 0

    def store_experts(self, slots: NDArray[np.int64], positions: NDArray[np.int64], experts: RoutedExperts) -> None:
        """Store the experts [..., L, K] of ids that were computed; `slots` and `positions` are [...]."""
        if self._experts is not None:
            self._experts[slots, positions] = experts

    def copy_experts(self, source: int, target: int, length: int) -> None:
        """Copy those of positions [0, length) from one slot to another."""
        if self._experts is not None:
            self._experts[target, :length] = self._experts[source, :length]

    def get_experts(self, slot: int) -> RoutedExperts | None:
        """[R, L, K] a copy of those of all ids of a slot but the last; None if an id was not computed."""
        num_computed = int(self.length[slot]) - 1
        if self._experts is None or self.num_cached[slot] < num_computed:
            return None
        experts: RoutedExperts = self._experts[slot, :num_computed].copy()
        return experts

    def reserve(self, length: int) -> None:
        """Make room for `length` positions."""
        if length > self.capacity:
            capacity = max(_MIN_CAPACITY, 2 * self.capacity, length)
            self.resize(self.num_slots, min(capacity, max(length, self._context_length)))

    def resize(self, num_slots: int, capacity: int) -> None:
        """Have this many slots and positions; what does not fit is dropped."""
        for name in ("ids", "logprobs"):
            setattr(self, name, _fit(getattr(self, name), num_slots, capacity))
        for name in ("num_cached", "length", "limit", "running", "_last_used", "params", "adapters"):
            setattr(self, name, _fit(getattr(self, name), num_slots))
        if self._experts is not None:
            self._experts = _fit(self._experts, num_slots, capacity)

    def _longest_prefix(self, prompt_ids: TokenIds, adapter: int) -> tuple[int, int]:
        """Find the slot of this adapter that shares the most leading ids with the prompt, without its last id, and
        their number.
        """
        width = min(len(prompt_ids) - 1, self.capacity)
        if width == 0 or not self.num_cached.any():
            return 0, 0
        same = self.ids[:, :width] == prompt_ids[:width]
        common = np.where(same.all(axis=1), width, same.argmin(axis=1))
        common = np.where(self.adapters == adapter, np.minimum(common, self.num_cached), 0)
        # Of equally good slots, prefer an idle one whose whole cache is shared: it needs no copy.
        best = np.lexsort((self.num_cached != common, self.running, -common))[0]
        return int(best), int(common[best])

    def _free_slot(self) -> int:
        """Return an empty slot, a new one, or the idle one that was used least recently."""
        idle = np.flatnonzero(~self.running)
        has_room = self.num_slots < self._max_slots and 2 * self.num_slots * self.capacity <= _MAX_SPARE
        if not idle.size or (self.num_cached[idle].all() and has_room):
            first_new = self.num_slots
            self.resize(min(max(8, 2 * first_new), self._max_slots), self.capacity)
            return first_new
        return int(idle[self._last_used[idle].argmin()])


def _fit(old: NDArray[Any], *sizes: int) -> NDArray[Any]:
    """Cut the leading dimensions of an array to `sizes`, or fill them up with zeros."""
    new = np.zeros((*sizes, *old.shape[len(sizes) :]), dtype=old.dtype)
    kept = tuple(map(slice, np.minimum(old.shape, new.shape)))
    new[kept] = old[kept]
    return new
