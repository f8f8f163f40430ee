"""Daemon threads for blocking functions, and one for an event loop; an event loop that responds in time, a lock for a
renderer, memory that a process does not need, and the end of one that does not end by itself.

It imports little: commands load it at their start.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import contextvars
import ctypes
import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_SWITCH_S = 0.0005
_NUM_NEW_OBJECTS = 20_000


@contextmanager
def keep_loop_responsive() -> Iterator[None]:
    """Keep this process's event loop from waiting for the garbage collector and for other threads, in the block.

    The garbage collector does not look at what is loaded before it: with torch and vLLM that took 0.5 s each time. It
    looks at new objects once there are 20,000 more of them, which is some tens of requests, instead of 700, which is a
    few: nearly all are freed without it. A thread hands the interpreter over after 0.5 ms instead of 5: a request needs
    the loop about ten times.
    """
    before = sys.getswitchinterval()
    # Unfreezing has no parts: it would release what a program or a block around this one has frozen too, and a million
    # objects would be looked at again, in each collection after it.
    frozen_before = gc.get_freeze_count() > 0
    if not frozen_before:
        gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(_NUM_NEW_OBJECTS, *thresholds[1:])
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.set_threshold(*thresholds)
        if not frozen_before:
            gc.unfreeze()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call(Generic[T]):
    function: Callable[[], T]
    context: contextvars.Context
    finished: asyncio.Future[tuple[T | None, BaseException | None]]
    inbox: _Inbox


class _Inbox:
    """Outcomes for an event loop, which is woken once for all that come before it looks.

    A wake-up is a call of the system, and takes longer than many of the functions.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._outcomes: deque[tuple[asyncio.Future[Any], Any]] = deque()
        self._is_woken = False

    def put(self, finished: asyncio.Future[Any], outcome: Any) -> None:
        """Resolve a future of the loop; called in a thread."""
        self._outcomes.append((finished, outcome))
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                self.loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        self._is_woken = False  # first: what comes from here on wakes the loop again
        while self._outcomes:
            finished, outcome = self._outcomes.popleft()
            if not finished.done():
                finished.set_result(outcome)


class DaemonThreads:
    """Threads that run blocking functions for an event loop, a bounded number at a time.

        threads = DaemonThreads(1)
        rendered = await threads.run(lambda: renderer.render(messages))

    A loop with 64 rollouts may start 64 calls at once. As many threads would compete for the interpreter with the loop,
    which then waits half a second for its turn. Calls wait in one line, first come, first served. A thread ends when no
    call waits.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._num_threads = 0
        self._calls: deque[_Call[Any]] = deque()
        self._inbox: _Inbox | None = None
        """Of the loop that called last."""
        self._mutex = threading.Lock()

    async def run(self, function: Callable[[], T]) -> T:
        """Call `function` in a thread, and return its result or raise its exception, `SystemExit` included.

        When the caller stops waiting (a timeout, a cancellation), a call that waits is dropped, and a function that
        runs continues, and its result is dropped. With `asyncio.to_thread` it would delay the end of the loop and of
        the interpreter.
        """
        loop = asyncio.get_running_loop()
        if (inbox := self._inbox) is None or inbox.loop is not loop:
            inbox = self._inbox = _Inbox(loop)
        finished: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
        call = _Call(function=function, context=contextvars.copy_context(), finished=finished, inbox=inbox)
        with self._mutex:
            self._calls.append(call)
            needs_thread = self._num_threads < self._max_threads
            self._num_threads += needs_thread
        if needs_thread:
            # `start` waits until the new thread had its turn, 5 ms if another one is busy: not in the loop's thread.
            _thread.start_new_thread(threading.Thread(target=self._work, daemon=True).start, ())
        result, error = await finished
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # without an error there is a result

    def _work(self) -> None:
        while (call := self._take_call()) is not None:
            if not call.finished.cancelled():
                outcome = call.context.run(_call_and_catch, call.function)
                call.inbox.put(call.finished, outcome)
                del outcome
            del call  # an idle thread keeps no result alive

    def _take_call(self) -> _Call[Any] | None:
        """The next call; None ends the calling thread."""
        with self._mutex:
            if not self._calls:
                self._num_threads -= 1
                return None
            return self._calls.popleft()


def _call_and_catch(function: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:  # raised in the caller, SystemExit included
        return None, error


class RendererLock:
    """A lock that lets one thread at a time run a renderer's Python code.

    Python runs one thread at a time anyway: each further thread that wants to run only makes an event loop wait another
    5 ms (`sys.getswitchinterval`). The tokenizers library needs no Python, so while it works the lock is released:

        thread A   render ── marks ── [tokenizer: lock released ........] ── ids
        thread B   waits ............ render ── marks ── [tokenizer ....] .. ids

    It is reentrant. `released` gives it up for a while; others wait in no particular order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._owner != threading.get_ident():
            self._acquire(depth=0)
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._release()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock inside this context, if the calling thread has it."""
        depth = self._release() if self._owner == threading.get_ident() else 0
        try:
            yield
        finally:
            if depth:
                self._acquire(depth=depth)

    def _acquire(self, *, depth: int) -> None:
        self._lock.acquire()
        self._owner, self._depth = threading.get_ident(), depth

    def _release(self) -> int:
        depth = self._depth
        self._owner, self._depth = None, 0
        self._lock.release()
        return depth


def give_memory_back() -> None:
    """Give what was freed back to the system: glibc keeps most of it, and some objects are in cycles of references."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)


def exit_in(seconds: float, *, status: int) -> Callable[[], None]:
    """End this process after some time, with this exit status, unless it has ended or what is returned was called."""
    exit_now = threading.Timer(seconds, os._exit, args=(status,))
    exit_now.daemon = True
    exit_now.start()
    return exit_now.cancel


async def run_in_daemon_thread(function: Callable[[], T]) -> T:
    """Call `function` in a new thread, and return its result or raise its exception; see `DaemonThreads.run`."""
    return await DaemonThreads(1).run(function)


class LoopThread:
    """An event loop in a daemon thread. Tasks keep running between two calls of `run`.

    For synchronous code, and for what must run while the main loop is blocked.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="unbroken-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. An interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine from another event loop and return its result. Cancelling this call cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        """End the loop and its thread. Idempotent."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
