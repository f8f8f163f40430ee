"""Group commit: turns of many sessions share one transaction, so that they share its wait for the disk."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from unbroken.errors import StoreError
from unbroken.ledger.records import TurnCommit
from unbroken.ledger.store.base import SessionStore

MAX_GROUP = 256
"""Most commits of one transaction."""


class SessionWriter:
    """Commits turns to a store in its own thread. For one event loop.

    A transaction takes all commits that are waiting when it begins. While it is written, the next ones gather: with one
    session at work each turn has its own transaction, and nobody ever waits for others to come.
    """

    def __init__(self, store: SessionStore, *, max_waiting: int = 1024) -> None:
        """Start the thread.

        Args:
            store: Where to; it stays open when the writer is closed.
            max_waiting: How many commits may wait or be written; further callers of `commit` wait until one is done.
        """
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(max_waiting)
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="session-writer", daemon=True)
        self._thread.start()

    async def commit(self, commit: TurnCommit) -> None:
        """Return when the commit is on disk.

        A cancelled caller's commit is written all the same, unless it was still waiting for a place.

        Raises:
            StoreError: it was not stored; the commits of others are not affected. As `SessionStore.commit`.
        """
        await self._slots.acquire()
        if self._closed:
            self._slots.release()
            raise StoreError("the writer of the sessions is closed: this turn is not stored")
        waiting = _Waiting(commit, self._loop.create_future())
        self._queue.put(waiting)
        await waiting.done

    async def close(self) -> None:
        """Write what is waiting, then end the thread. Nothing happens if it is closed."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while True:
            group, is_last = self._take()
            if group:
                errors = self._write([waiting.commit for waiting in group])
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    self._loop.call_soon_threadsafe(self._resolve, group, errors)
            if is_last:
                return

    def _take(self) -> tuple[list[_Waiting], bool]:
        """Wait for a commit, and take those that wait with it; and whether there will be no more."""
        group: list[_Waiting] = []
        while len(group) < MAX_GROUP:
            try:
                waiting = self._queue.get(block=not group)
            except queue.Empty:
                break
            if waiting is None:
                return group, True
            group.append(waiting)
        return group, False

    def _write(self, commits: Sequence[TurnCommit]) -> list[Exception | None]:
        """Store all at once, or those that can be stored one by one; the error of each."""
        try:
            self._store.commit(commits)
        except Exception as error:  # of any kind: it belongs to the caller, and the thread continues
            if len(commits) == 1:
                return [error]
            return [each for commit in commits for each in self._write([commit])]
        return [None] * len(commits)

    def _resolve(self, group: Sequence[_Waiting], errors: Sequence[Exception | None]) -> None:
        for waiting, error in zip(group, errors, strict=True):
            self._slots.release()
            if waiting.done.cancelled():
                continue
            if error is None:
                waiting.done.set_result(None)
            else:
                waiting.done.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Waiting:
    commit: TurnCommit
    done: asyncio.Future[None] = field(compare=False)
