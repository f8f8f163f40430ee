"""Daemon threads: for blocking functions outside the event loop, and for an event loop of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from unbroken.rendering.base import Renderer, ThreadedRenderer
from unbroken.rendering.threads import DaemonThreads

T = TypeVar("T")


async def run_in_daemon_thread(function: Callable[[], T]) -> T:
    """Call `function` in a new thread, and return its result or raise its exception; see `DaemonThreads.run`."""
    return await DaemonThreads(1).run(function)


async def run_in_renderer_thread(renderer: Renderer, function: Callable[[], T]) -> T:
    """Call `function`, which uses the renderer, in one of the renderer's threads, or a new one if it has none."""
    threads = renderer.renderer_threads if isinstance(renderer, ThreadedRenderer) else DaemonThreads(1)
    return await threads.run(function)


class LoopThread:
    """An event loop in a daemon thread. Tasks keep running between two calls of `run`.

    For synchronous code, and for what must go on while the main loop is blocked.
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
