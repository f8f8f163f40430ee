"""Run blocking functions outside the event loop, in daemon threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

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
