"""Read the SQLite database of a store's folder as it is: also while a gateway writes, and after it was killed.

What has to be read depends on the database's log, `sessions.sqlite3-wal`:

log        its index (-shm)    read
none       -                   the database, read as unchanging; read again if it changed meanwhile
there      there               the database and the log, with an index that is read only
there      none                a copy of both: SQLite would make the index beside them

So no file is made, written, truncated or removed, and a gateway never waits. (SQLite removes an empty log and its index
when a gateway ends; what a killed one leaves is a log with an index.)
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from unbroken.errors import InvalidInputError, StoreError
from unbroken.ledger.store.database import Cursor
from unbroken.ledger.store.reading import StoreReader, StoreState
from unbroken.ledger.store.schema import check_version
from unbroken.ledger.store.sqlite import DATABASE_FILE, LOCK_FILE

T = TypeVar("T")
_MAX_ATTEMPTS = 40
_PAUSE_S = 0.025
_INDEX_BYTES = 8
"""Shorter ones are being made."""


def open_sqlite_reader(folder: Path) -> StoreReader:
    """Open the store in a folder to read it.

    Raises:
        InvalidInputError: the folder has no store, or a link in place of one of its files.
    """
    if not (folder / DATABASE_FILE).is_file():
        raise InvalidInputError(f"store must be a folder with {DATABASE_FILE}, got {folder}")
    for name in (DATABASE_FILE, f"{DATABASE_FILE}-wal", f"{DATABASE_FILE}-shm", LOCK_FILE):
        if (folder / name).is_symlink():
            raise InvalidInputError(f"store must be a folder of files, but {folder / name} is a link")
    return StoreReader(_SqliteSnapshots(folder))


class _ChangedError(Exception):
    """Somebody wrote in the meantime."""


class _SqliteSnapshots:
    """Implements `Snapshots`; between two calls nothing is open."""

    def __init__(self, folder: Path) -> None:
        self._lock = folder / LOCK_FILE
        self._path = folder.resolve() / DATABASE_FILE
        self._log = self._path.with_name(f"{DATABASE_FILE}-wal")
        self._index = self._path.with_name(f"{DATABASE_FILE}-shm")

    def read(self, work: Callable[[Cursor], T]) -> T:
        """See `Snapshots`."""
        for attempt in range(_MAX_ATTEMPTS):
            try:
                with self._open() as connection:
                    return _read(connection, work, place=str(self._path))
            except (_ChangedError, sqlite3.Error, OSError) as error:
                # A gateway may have begun, written or ended at this moment.
                if attempt == _MAX_ATTEMPTS - 1:
                    raise StoreError(f"{self._path} cannot be read: {error}") from error
                time.sleep(_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    def find_state(self) -> StoreState:
        """See `Snapshots`. A gateway that ends removes the log; the lock has the number of the last one's process."""
        if not self._log.exists():
            return StoreState.ENDED
        try:
            holder = self._lock.read_text("ascii", "replace").strip()
        except OSError:
            holder = ""
        return (
            StoreState.RUNNING if holder.isdigit() and len(holder) < 10 and is_running(int(holder)) else StoreState.DIED
        )

    def find_revision(self) -> str:
        """See `Snapshots`."""
        return repr((_sign(self._path), _sign(self._log), self.find_state().value))

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        if not _sign(self._log)[1]:
            with self._unchanged(), _connect(self._path, "immutable=1") as connection:
                yield connection
        elif _sign(self._index)[1] >= _INDEX_BYTES:
            with _connect(self._path, "mode=ro&readonly_shm=1") as connection:
                yield connection
        else:
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder) / DATABASE_FILE
                with self._unchanged():
                    shutil.copyfile(self._path, copy)
                    shutil.copyfile(self._log, copy.with_name(self._log.name))
                with _connect(copy, "mode=rw") as connection:
                    yield connection

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        before = _sign(self._path), _sign(self._log)[1]
        yield
        if before != (_sign(self._path), _sign(self._log)[1]):
            raise _ChangedError("it is written while it is read")


def is_running(process: int) -> bool:
    """Whether this machine has a process of this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True


@contextmanager
def _connect(path: Path, options: str) -> Iterator[sqlite3.Connection]:
    with closing(
        sqlite3.connect(f"{path.as_uri()}?{options}", uri=True, isolation_level=None, timeout=5)
    ) as connection:
        yield connection


def _read(connection: sqlite3.Connection, work: Callable[[Cursor], T], *, place: str) -> T:
    connection.execute("BEGIN")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    check_version(version, place=place)
    programs = "type IN ('view', 'trigger') OR sql LIKE 'CREATE VIRTUAL%' OR sql LIKE '% AS (%'"
    if (found := connection.execute(f"SELECT name FROM sqlite_master WHERE {programs}").fetchone()) is not None:
        raise StoreError(f"{place} must have tables only, which gateways make, but {found[0]!r} is computed when read")
    return work(Cursor(connection.cursor()))


def _sign(path: Path) -> tuple[int, int]:
    """Time and size of a file; (0, 0) if it does not exist."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size
