"""SIGTERM ends a run as Ctrl-C does: what is open is closed before the interpreter ends.

SIGTERM ──► the run's task is cancelled ──► engines, servers and files are closed ──► `Terminated`
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from unbroken.threads import exit_in

INTERRUPTED = 130
"""The exit status after Ctrl-C, as in shells."""
TERMINATED = 128 + signal.SIGTERM
"""The exit status after SIGTERM, as in shells."""
_AGAIN_S = 0.1
"""Seconds between two looks at whether a task that is being cancelled goes on."""
_THREADS_S = 15.0
"""How long threads that still compute may hold up the exit: some wait for other processes, which ended too."""
_CLOSING_S = 60.0
"""How long what Ctrl-C closes may still take once SIGTERM came too: longer than launchers wait before they kill."""


class Terminated(BaseException):
    """The run was ended by SIGTERM, and what it had open is closed."""


@contextmanager
def cancelled_by_sigterm() -> Iterator[None]:
    """Cancel the task that runs the block if SIGTERM comes. A command's coroutine enters it first.

    In another thread than the main one, as beside a notebook's loop, signals are left to the process.

    Raises:
        Terminated: SIGTERM came. A step that is still computed in a thread holds up the process for 15 s at most, and
            what Ctrl-C closes for a minute.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a coroutine enters it"
    came = asyncio.Event()
    waiting: list[asyncio.TimerHandle] = []
    bounds = ExitStack()

    def terminate() -> None:
        if not came.is_set():  # a second signal shall not cut short what the first one closes and saves
            came.set()
            if task.cancelling() > 0:  # a close that hangs after Ctrl-C would never end: nothing cancels it again
                bounds.callback(exit_in(_CLOSING_S, status=TERMINATED))
            cancel()

    def cancel() -> None:
        if task.cancelling() == 0:
            bounds.close()
            task.cancel()
        else:  # by Ctrl-C, which closes all; or by a time limit, after which the task goes on
            waiting[:] = [loop.call_later(_AGAIN_S, cancel)]

    can_handle = threading.current_thread() is threading.main_thread()
    if can_handle:
        loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        yield
    except asyncio.CancelledError:
        if not came.is_set():
            raise
        raise Terminated from None
    finally:
        if can_handle:
            loop.remove_signal_handler(signal.SIGTERM)
        for handle in waiting:
            handle.cancel()
        bounds.close()
        if came.is_set():  # also where what was open could not be closed
            exit_in(_THREADS_S, status=TERMINATED)
