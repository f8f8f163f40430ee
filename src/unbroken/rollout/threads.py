"""Blocking functions outside the event loop, in threads that nobody has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(function: Callable[[], T]) -> T:
    """Call `function` in a thread of its own and return what it returns, or raise what it raises.

    A thread cannot be killed: when the caller stops waiting (a timeout, a cancellation), the function runs on and its
    result is dropped. `asyncio.to_thread` would let such a function hold up the end of the loop and of the interpreter,
    and take a place in a pool of bounded size; a daemon thread does neither.
    """
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

    def work() -> None:
        outcome = _outcome_of(function)
        # The loop may be gone by now, and with it everybody who waited.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, finished, outcome)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), daemon=True).start()
    result, error = await finished
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # without an error there is a result


def _outcome_of(function: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:  # carried over to the caller, SystemExit included
        return None, error


def _resolve(finished: asyncio.Future[Any], outcome: Any) -> None:
    if not finished.done():
        finished.set_result(outcome)
