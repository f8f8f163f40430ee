"""SIGTERM ends a run as Ctrl-C does: what is open is closed before the interpreter ends.

SIGTERM ──► the run's task is cancelled ──► engines, servers and files are closed ──► `Terminated`
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
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


def run_command(work: Callable[[], object], *, advice: str) -> int:
    """Do the work of a command; returns its exit status. What ends it early is printed, with `advice` on what to do."""
    try:
        work()
    except KeyboardInterrupt:
        print(f"unbroken: interrupted; {advice}", file=sys.stderr)
        return INTERRUPTED
    except Terminated:
        print(f"unbroken: terminated; {advice}", file=sys.stderr)
        return TERMINATED
    return 0


def run_until_terminated(main: Coroutine[Any, Any, _T]) -> _T:
    """Run `main` in its own event loop, and return its result.

    Raises:
        Terminated: SIGTERM came. A step that is still computed in a thread holds up the process for 15 s at most.
    """
    return asyncio.run(_run(main))


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
