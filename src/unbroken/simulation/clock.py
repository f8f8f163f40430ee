"""An event loop whose clock is virtual: where others wait for the next timer, it jumps there.

    real loop      sleep(5) and sleep(3)     5 seconds of everybody's time
    virtual loop   sleep(5) and sleep(3)     time() is 3, then 5, at once

It is for code that waits only for timers and for other tasks. Threads, processes and sockets have times of their own.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from unbroken.errors import SimulationError

_T = TypeVar("_T")


class _JumpingSelector(selectors.DefaultSelector):
    """Advances the clock instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors.BaseSelector`."""
        if timeout is None:
            raise SimulationError("the simulation stands still: every task waits for another one, and no timer is left")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """The loop; `time()` begins at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now_s


def run_on_virtual_clock(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on a clock of its own, outside of any event loop; raises `SimulationError` if it stands still."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
