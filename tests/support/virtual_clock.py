"""An event loop on a virtual clock, which jumps to the next timer instead of waiting for it.

    real loop      sleep(5) and sleep(3)     5 seconds of everybody's time
    virtual loop   sleep(5) and sleep(3)     time() is 3, then 5, at once

That is for code that waits only for timers and for other tasks. What would run in a thread runs at once, in no time;
processes and sockets have times of their own.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _JumpingSelector(selectors.DefaultSelector):
    """Advances the clock instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors.BaseSelector`."""
        if timeout is None:
            raise RuntimeError("the virtual clock stands still: every task waits for another one, and no timer is left")
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

    def run_in_executor(self, executor: Any, func: Callable[..., _T], *args: Any) -> asyncio.Future[_T]:  # type: ignore[override]
        """Run the function at once."""
        done: asyncio.Future[_T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run_on_virtual_clock(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on a clock of its own, outside of any event loop; raises `RuntimeError` if it stands still."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
