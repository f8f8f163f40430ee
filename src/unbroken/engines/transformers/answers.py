"""Answers from a thread to callers in event loops, delivered together: one wake-up per loop for all of them.

An `Answer` comes once; a `Feed` brings many items, and each is delivered with the answers of its step.

A wake-up costs a system call and a wait for the interpreter lock; with a small model, one for each finished request
would cost as much as sampling it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Outbox:
    """Holds answers until `flush`. Used by one thread; `Answer`s are made in the callers' event loops."""

    def __init__(self) -> None:
        self._deliveries: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []

    def add(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[], None]) -> None:
        """Call `deliver` in `loop` with the next flush, after what was added before."""
        self._deliveries.append((loop, deliver))

    def flush(self) -> None:
        """Wake every event loop that has deliveries."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = defaultdict(list)
        for loop, deliver in self._deliveries:
            by_loop[loop].append(deliver)
        self._deliveries.clear()
        for loop, deliveries in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed: no caller waits in it
                loop.call_soon_threadsafe(_call_all, deliveries)


class Answer(Generic[_T]):
    """The answer to one caller, who awaits `future` in its loop; another thread resolves or fails it once."""

    def __init__(self, outbox: Outbox) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[_T] = self.loop.create_future()
        self._outbox = outbox
        self._value: _T | None = None
        self._error: Exception | None = None

    def resolve(self, value: _T) -> None:
        """Return `value` to the caller."""
        self._value = value
        self._outbox.add(self.loop, self._deliver)

    def fail(self, error: Exception) -> None:
        """Raise `error` in the caller."""
        self._error = error
        self._outbox.add(self.loop, self._deliver)

    def _deliver(self) -> None:
        """Settle the future, in the caller's loop, unless the caller was cancelled."""
        if self.future.done():
            return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._value)  # type: ignore[arg-type]  # resolved: _T, which may include None


class Feed(Generic[_T]):
    """Items for one caller, who takes them from `items` in its loop; another thread puts them in.

    The queue needs no bound: a request puts in at most the ids that it may sample.
    """

    def __init__(self, outbox: Outbox) -> None:
        self.items: asyncio.Queue[_T] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._outbox = outbox

    def put(self, item: _T) -> None:
        """Send `item` to the caller."""
        self._outbox.add(self._loop, lambda: self.items.put_nowait(item))


def _call_all(deliveries: list[Callable[[], None]]) -> None:
    for deliver in deliveries:
        deliver()
