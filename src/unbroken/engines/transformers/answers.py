"""Answers from a thread to callers in event loops, delivered together: one wake-up per loop, however many there are.

A wake-up costs a system call and a contest for the interpreter lock; on a small model, one for each finished request
would cost as much as sampling it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import suppress
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Outbox:
    """Holds answers until `flush`. Used by one thread; `Answer`s are made in the callers' event loops."""

    def __init__(self) -> None:
        self._answers: list[Answer[Any]] = []

    def add(self, answer: Answer[Any]) -> None:
        """Deliver this answer with the next flush."""
        self._answers.append(answer)

    def flush(self) -> None:
        """Wake every event loop that has answers."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[Answer[Any]]] = defaultdict(list)
        for answer in self._answers:
            by_loop[answer.loop].append(answer)
        self._answers.clear()
        for loop, answers in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed, and nobody waits in it
                loop.call_soon_threadsafe(_deliver, answers)


class Answer(Generic[_T]):
    """What one caller waits for: it awaits `future` in its loop, and another thread resolves or fails it once."""

    def __init__(self, outbox: Outbox) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[_T] = self.loop.create_future()
        self._outbox = outbox
        self._value: _T | None = None
        self._error: Exception | None = None

    def resolve(self, value: _T) -> None:
        """Return `value` to the caller."""
        self._value = value
        self._outbox.add(self)

    def fail(self, error: Exception) -> None:
        """Raise `error` in the caller."""
        self._error = error
        self._outbox.add(self)

    def deliver(self) -> None:
        """In the caller's loop: settle the future, unless the caller was cancelled."""
        if self.future.done():
            return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._value)  # type: ignore[arg-type]  # resolved: _T, which may include None


def _deliver(answers: list[Answer[Any]]) -> None:
    for answer in answers:
        answer.deliver()
