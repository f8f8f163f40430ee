"""SIGTERM ends a run as Ctrl-C does: what is open is closed before the interpreter ends.

SIGTERM ──► the run's task is cancelled ──► engines, servers and files are closed ──► `Terminated`
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from unbroken.threads import exit_in

_T = TypeVar("_T")
INTERRUPTED = 130
"""The exit status after Ctrl-C, as in shells."""
TERMINATED = 128 + signal.SIGTERM
"""The exit status after SIGTERM, as in shells."""
_THREADS_S = 15.0
"""How long threads that still compute may hold up the exit: some wait for other processes, which ended too."""


class Terminated(BaseException):
    """The run was ended by SIGTERM, and what it had open is closed."""


def run_until_terminated(main: Coroutine[Any, Any, _T]) -> _T:
    """Run `main` in its own event loop, and return its result. Where a loop runs, as in a notebook, in its own thread.

    Raises:
        Terminated: SIGTERM came. A step that is still computed in a thread holds up the process for 15 s at most.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_run(main))
    return _run_in_thread(main)


def _run_in_thread(main: Coroutine[Any, Any, _T]) -> _T:
    """Run `main` in a thread, with this one's context variables; an interrupt, as of a notebook, cancels it."""
    opened: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def run() -> _T:
        opened.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await main

    with ThreadPoolExecutor(1, thread_name_prefix="unbroken run") as pool:
        done = pool.submit(contextvars.copy_context().run, asyncio.run, run())
        try:
            return done.result()
        except KeyboardInterrupt:
            loop, task = opened.result()
            if not done.done() and task is not None:
                loop.call_soon_threadsafe(task.cancel)
            raise  # once the pool is closed, which waits until the run has closed what it had open


async def _run(main: Coroutine[Any, Any, _T]) -> _T:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(main)
    came = asyncio.Event()

    def terminate() -> None:
        if not came.is_set():  # a second signal shall not cut short what the first one closes
            came.set()
            task.cancel()

    can_handle = threading.current_thread() is threading.main_thread()
    if can_handle:
        loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await task
    except asyncio.CancelledError:
        if not came.is_set():
            raise
        exit_in(_THREADS_S, status=TERMINATED)
        raise Terminated from None
    finally:
        if can_handle:
            loop.remove_signal_handler(signal.SIGTERM)
