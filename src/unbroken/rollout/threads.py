"""Run blocking functions outside the event loop, in daemon threads."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(function: Callable[[], T]) -> T:
    """Call `function` in a new thread, and return its result or raise its exception.

    When the caller stops waiting (a timeout, a cancellation), the function continues and its result is dropped. With
    `asyncio.to_thread` it would delay the end of the loop and of the interpreter, and block a thread of a bounded pool.
    """
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

    def work() -> None:
        outcome = _call_and_catch(function)
        # The loop may be closed by now.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, finished, outcome)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), daemon=True).start()
    result, error = await finished
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # without an error there is a result


def _call_and_catch(function: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:  # raised in the caller, SystemExit included
        return None, error


def _resolve(finished: asyncio.Future[Any], outcome: Any) -> None:
    if not finished.done():
        finished.set_result(outcome)
