"""A key-value cache of slots: each row of a batch reads and writes at its own position of its own slot.

It works with any decoder of transformers that takes a `Cache` and a four-dimensional attention mask. Before a forward
pass it is aimed (which slots, which positions); then every layer stores its new keys there and returns the keys of
those slots from position 0 on. The mask hides later positions and leftovers of an earlier row.

Shapes: S slots, N positions a slot holds, R rows of one forward pass, T ids per row, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(slots=True, kw_only=True)
class _Aim:
    """Where the next forward pass reads and writes; one object shared by all layers."""

    num_slots: int = 0
    capacity: int = 0
    read: slice | torch.Tensor = field(default_factory=lambda: slice(0, 0))
    """The slots of the rows: a slice, which copies nothing, if they are consecutive; else [R]."""
    write_slots_R1: torch.Tensor | None = None
    write_positions_RT: torch.Tensor | None = None
    length: int = 0
    """Positions [0, length) are read."""


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """Keys and values [S, H, N, D] of one layer."""

    def __init__(self, aim: _Aim) -> None:
        super().__init__()
        self._aim = aim

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._allocate(key_states)
        self.values = self._allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [R, H, T, D] at the aim and return [R, H, length, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        aim = self._aim
        self.keys[aim.write_slots_R1, :, aim.write_positions_RT] = key_states.transpose(1, 2)
        self.values[aim.write_slots_R1, :, aim.write_positions_RT] = value_states.transpose(1, 2)
        return self.keys[aim.read, :, : aim.length], self.values[aim.read, :, : aim.length]

    def resize(self) -> None:
        """Make room for exactly the aim's slots and positions, keeping what is stored there."""
        if self.is_initialized:
            self.keys = self._fit(self.keys)
            self.values = self._fit(self.values)

    def erase(self) -> None:
        if self.is_initialized:
            self.keys.zero_()
            self.values.zero_()

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.keys[target, :, :length] = self.keys[source, :, :length]
        self.values[target, :, :length] = self.values[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._aim.length, 0

    def get_seq_length(self) -> int:
        return self._aim.length

    def get_max_length(self) -> int:
        return -1

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        # Zeros: masked positions are multiplied by 0, and uninitialised memory may hold NaN.
        return states.new_zeros(self._aim.num_slots, states.shape[1], self._aim.capacity, states.shape[3])

    def _fit(self, stored: torch.Tensor) -> torch.Tensor:
        num_slots, capacity = self._aim.num_slots, self._aim.capacity
        if (stored.shape[0], stored.shape[2]) == (num_slots, capacity):
            return stored
        fitting, kept = self._allocate(stored), stored[:num_slots, :, :capacity]
        fitting[: kept.shape[0], :, : kept.shape[2]] = kept
        return fitting


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Slots of keys and values for all layers; memory is taken when first used and when it grows."""

    def __init__(self, num_layers: int) -> None:
        self._aim = _Aim()
        super().__init__(layers=[_SlotLayer(self._aim) for _ in range(num_layers)])

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Grow to at least `num_slots` slots of `capacity` positions each; if memory is too small, stay as before."""
        aim = self._aim
        before = aim.num_slots, aim.capacity
        if num_slots > aim.num_slots or capacity > aim.capacity:
            aim.num_slots, aim.capacity = max(num_slots, aim.num_slots), max(capacity, aim.capacity)
            try:
                for layer in self.layers:
                    layer.resize()
            except (MemoryError, RuntimeError):
                aim.num_slots, aim.capacity = before
                for layer in self.layers:
                    layer.resize()
                raise

    def aim(self, slots_R: torch.Tensor, positions_RT: torch.Tensor, *, length: int, consecutive: bool) -> None:
        """Set where the next forward pass reads and writes; `consecutive` slots are read without a copy."""
        first = int(slots_R[0])
        self._aim.read = slice(first, first + len(slots_R)) if consecutive else slots_R
        self._aim.write_slots_R1 = slots_R[:, None]
        self._aim.write_positions_RT = positions_RT
        self._aim.length = length

    @torch.inference_mode()
    def erase(self) -> None:
        """Set everything to zero: a masked NaN is still NaN, because it is multiplied by 0."""
        for layer in self.layers:
            layer.erase()

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy positions [0, length) from one slot to another."""
        for layer in self.layers:
            layer.copy_prefix(source, target, length)
