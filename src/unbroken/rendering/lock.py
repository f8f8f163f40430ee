"""A lock that lets one thread at a time run a renderer's Python code, so that an event loop beside it gets its turn.

Python runs one thread at a time anyway: each further thread that wants to run only makes an event loop wait another
5 ms (`sys.getswitchinterval`). The tokenizers library needs no Python, so while it works the lock is released:

    thread A   render ── marks ── [tokenizer: lock released ........] ── ids
    thread B   waits ............ render ── marks ── [tokenizer ....] .. ids
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class RendererLock:
    """Reentrant. `released` gives it up for a while; others wait in no particular order."""

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
