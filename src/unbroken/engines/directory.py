"""Which servers there are, while some come and others go.

engines.txt                  follow()                          one task for each address, while it is listed
http://10.0.0.1:8000   ──►   read again twice a second   ──►   join ── refused: said once, tried again
http://10.0.0.2:8000                                            │ taken in
                                                               health ── two failures, or no longer listed: leave
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import urlsplit

from unbroken.errors import InvalidInputError, UnbrokenError
from unbroken.untrusted import read_file

_POLL_S = 0.5
"""How often the list is read, and each server asked for its health."""
_SETTLES_S = 0.25
"""How long a file must have the same addresses before they count."""
MAX_FAILURES = 2
"""After so many health checks in a row a server is gone; one may fail for a busy server."""

_MAX_BYTES = 2**20
"""Of a file of addresses: some ten thousand."""

_log = logging.getLogger(__name__)


@runtime_checkable
class EngineDirectory(Protocol):
    """A list of servers that changes. A list that does not change is a sequence of addresses."""

    def addresses(self) -> tuple[str, ...]:
        """The addresses now. It is asked twice a second, in a thread: a file may be on another machine's disk."""
        ...


class FileDirectory:
    """A file with one address a line. Empty lines, and what follows `#`, are left out."""

    def __init__(self, path: Path) -> None:
        """The file may be written later."""
        self._path = path
        self._read: tuple[str, ...] | None = None
        self._since_s = 0.0
        """Since when it has been read so."""
        self._addresses: tuple[str, ...] = ()
        self._said = ""
        """The last warning."""

    def __str__(self) -> str:
        return str(self._path)

    def addresses(self) -> tuple[str, ...]:
        """Those that reads have found for a quarter of a second, so that a half-written file counts for nothing.

        A file that cannot be read changes nothing either. The first that can be read counts at once.
        """
        try:
            lines = read_file(self._path, max_bytes=_MAX_BYTES).decode("utf-8").splitlines()
        except FileNotFoundError:
            return self._addresses
        except (OSError, UnicodeDecodeError, InvalidInputError) as error:
            if self._said != (said := str(error)):
                _log.warning("the list of servers %s cannot be read, and stays as it is: %s", self._path, error)
            self._said = said
            return self._addresses
        stripped = (line.partition("#")[0].strip().rstrip("/") for line in lines)
        before, self._read = self._read, tuple(dict.fromkeys(filter(None, stripped)))
        now_s = time.monotonic()
        if before != self._read:
            self._since_s = now_s
        if before is None or now_s - self._since_s >= _SETTLES_S:
            self._addresses = self._read
        return self._addresses


class Members(Protocol):
    """Those who use the servers of a directory."""

    async def join(self, url: str) -> None:
        """Take a server in; raises `UnbrokenError` if it cannot be used yet, and is called again."""
        ...

    async def is_healthy(self, url: str) -> bool:
        """Whether a server that was taken in answers."""
        ...

    def leave(self, url: str) -> None:
        """Use a server no longer; it may not have been taken in."""
        ...


def follow(directory: EngineDirectory, members: Members, first: Iterable[str]) -> asyncio.Task[None]:
    """Begin to take servers in and let them go, until the task is cancelled. Those of `first` are in already."""
    task = asyncio.create_task(_follow(directory, members, tuple(first)))
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the list of servers is followed no longer", exc_info=error)


async def _follow(directory: EngineDirectory, members: Members, first: tuple[str, ...]) -> None:
    lives: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as tasks:
        while True:
            listed = await asyncio.to_thread(directory.addresses)
            for url in (*first, *listed):
                if url not in lives:
                    lives[url] = tasks.create_task(_accompany(url, members))
            first = ()
            for url in lives.keys() - set(listed):
                _log.warning("%s is no longer listed in %s", url, directory)
                lives.pop(url).cancel()
                members.leave(url)
            await asyncio.sleep(_POLL_S)


async def _accompany(url: str, members: Members) -> None:
    """Use one server whenever it can be used."""
    while True:
        await _join(url, members)
        num_failures = 0
        while num_failures < MAX_FAILURES:
            await asyncio.sleep(_POLL_S)
            num_failures = 0 if await members.is_healthy(url) else num_failures + 1
        _log.warning("%s does not answer any more, and is left out until it does", url)
        members.leave(url)


async def _join(url: str, members: Members) -> None:
    """Try until it is taken in; half of the time at most goes into tries."""
    said = ""
    while True:
        began_s = time.monotonic()
        try:
            check_address(url)
            await members.join(url)
        except UnbrokenError as error:
            if said != (said := str(error)):
                _log.warning("%s cannot be used yet, and is tried again: %s", url, error)
            await asyncio.sleep(max(_POLL_S, time.monotonic() - began_s))
        else:
            return


def check_address(url: str) -> None:
    """Raise `InvalidInputError` unless this is a server's address."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise InvalidInputError(f"a server's address must be http://HOST:PORT, got {url!r}")
