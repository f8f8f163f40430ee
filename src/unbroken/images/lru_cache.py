"""What was used last, within a limit: what was not used for longest is forgotten."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class LruCache(Generic[_K, _V]):
    """Values by key, of which only so much is kept. Safe to use from several threads.

    Args:
        most: the limit on the sum of all sizes.
        size_of: the size of a value; left out, each counts 1.
    """

    def __init__(self, most: int, size_of: Callable[[_V], int] | None = None) -> None:
        self._most = most
        self._size_of = size_of or (lambda value: 1)
        self._values: OrderedDict[_K, _V] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """The sum of all sizes."""
        return self._size

    def get(self, key: _K) -> _V | None:
        """The value, if it is still here; it counts as used now."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: _K, value: _V) -> None:
        """Keep a value, unless it is larger than all the room; one that is here already stays, and counts as used."""
        size = self._size_of(value)
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return
            if size > self._most:
                return
            self._values[key] = value
            self._size += size
            while self._size > self._most:
                self._size -= self._size_of(self._values.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._values.clear()
            self._size = 0
