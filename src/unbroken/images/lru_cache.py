"""A cache of limited size that evicts the least recently used values first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class LruCache(Generic[_K, _V]):
    """Values by key, with sizes (by default 1) of at most `max_size` in total. Safe to use from several threads."""

    def __init__(self, max_size: int, size_of: Callable[[_V], int] | None = None) -> None:
        self._max_size = max_size
        self._size_of = size_of or (lambda value: 1)
        self._values: OrderedDict[_K, _V] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """The sum of all sizes."""
        return self._size

    def get(self, key: _K) -> _V | None:
        """Get a value if it is cached, and mark it as used."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: _K, value: _V) -> None:
        """Cache a value in the place of an older one with this key, unless it exceeds the maximum size."""
        size = self._size_of(value)
        with self._lock:
            if key in self._values:
                self._size -= self._size_of(self._values.pop(key))
            if size > self._max_size:
                return
            self._values[key] = value
            self._size += size
            while self._size > self._max_size:
                self._size -= self._size_of(self._values.popitem(last=False)[1])

    def remove(self, key: _K) -> None:
        """Remove a value, if it is cached."""
        with self._lock:
            if key in self._values:
                self._size -= self._size_of(self._values.pop(key))

    def clear(self) -> None:
        """Remove all values."""
        with self._lock:
            self._values.clear()
            self._size = 0
