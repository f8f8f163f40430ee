"""What a command does where it takes long: how much is done, and how much time is left, a line every ten seconds.

    with show_progress():                                   the command
        begin("evaluation", total=64, unit="rollouts")      whoever begins a part of the work, at any depth
        advance()                                           whoever has done one of them

    evaluation: 24 of 64 rollouts in 0:00:20, about 0:00:33 left

Outside of `show_progress` the other two do nothing. What is done in less time is not said.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta

EVERY_S = 10.0
"""Seconds between two lines."""


@dataclass(slots=True, kw_only=True)
class _Work:
    """One part of the work."""

    what: str
    total: int | None = None
    unit: str = ""
    every_s: float
    num_done: int = 0
    began_s: float = field(default_factory=time.monotonic)


class _Progress:
    """The work of one command; its thread says how far it is."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._end = threading.Event()
        self.work: _Work | None = None
        self.thread = threading.Thread(target=self._tell, name="progress", daemon=True)

    def close(self) -> None:
        """Stop the thread."""
        self._end.set()
        self.thread.join()

    def _tell(self) -> None:
        said_s, wait_s = time.monotonic(), EVERY_S
        while not self._end.wait(wait_s):
            work, now = self.work, time.monotonic()
            wait_s = EVERY_S if work is None else max(work.began_s, said_s) + work.every_s - now
            if work is not None and wait_s <= 0:
                self._say(_describe(work.what, work.num_done, work.total, work.unit, seconds=now - work.began_s))
                said_s, wait_s = now, work.every_s


_current: ContextVar[_Progress | None] = ContextVar("progress", default=None)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def show_progress(say: Callable[[str], object] = _print) -> Iterator[None]:
    """Say what is done in the block, line by line, until it ends; by default on stderr, from a thread of its own."""
    if _current.get() is not None:  # a command within a command, as the demo's run
        yield
        return
    progress = _Progress(say)
    token = _current.set(progress)
    progress.thread.start()
    try:
        yield
    finally:
        _current.reset(token)
        progress.close()


def begin(what: str, *, total: int | None = None, unit: str = "", is_often: bool = True) -> None:
    """Begin a part of the work, of which `total` are to be done; unless `is_often`, a line comes once a minute."""
    if (progress := _current.get()) is not None:
        every_s = EVERY_S if is_often else 6 * EVERY_S
        progress.work = _Work(what=what, total=total, unit=unit, every_s=every_s)


def advance(number: int = 1) -> None:
    """Say that so many more are done."""
    progress = _current.get()
    if progress is not None and progress.work is not None:
        progress.work.num_done += number


def _describe(what: str, num_done: int, total: int | None, unit: str, *, seconds: float) -> str:
    """How far the work is after some seconds, in a line."""
    spent = timedelta(seconds=round(seconds))
    if total is None:
        return f"{what}: {spent} so far"
    done = min(num_done, total)  # those of the next step may be among them
    left = timedelta(seconds=round(seconds / done * (total - done))) if done else None
    return f"{what}: {done} of {total} {unit} in {spent}{f', about {left} left' if left else ''}"
