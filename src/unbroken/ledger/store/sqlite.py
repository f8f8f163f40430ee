"""Sessions in a folder: a SQLite database that one process at a time writes to.

FOLDER/sessions.sqlite3    the database (and its -wal and -shm while it is in use)
FOLDER/lock                locked by the process that uses it, with its number; free as soon as that ends in any way
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from unbroken.errors import InvalidInputError, StoreError
from unbroken.ledger.store.database import Cursor
from unbroken.ledger.store.schema import MIGRATIONS, find_statements
from unbroken.ledger.store.sql import SqlSessionStore

T = TypeVar("T")
DATABASE_FILE = "sessions.sqlite3"
LOCK_FILE = "lock"
_TYPES = {"key": "INTEGER PRIMARY KEY", "integer": "INTEGER", "float": "REAL", "blob": "BLOB"}
_SETTINGS = (
    "journal_mode = WAL",
    "synchronous = FULL",
    "foreign_keys = ON",
    "journal_size_limit = 67108864",  # after large images the log becomes small again
)
_OLDEST_SQLITE = (3, 35, 0)
"""The first with RETURNING."""


def open_sqlite_store(folder: Path, *, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> SqlSessionStore:
    """Open the store in a folder, which is made if it is missing; tables of an earlier version are migrated.

    Raises:
        InvalidInputError: the folder cannot be written.
        StoreError: another process uses it, its sessions are of a later version, or it is damaged.
    """
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        oldest = ".".join(map(str, _OLDEST_SQLITE))
        raise StoreError(f"sessions need SQLite {oldest} or later, and this Python has {sqlite3.sqlite_version}")
    return SqlSessionStore(_SqliteDatabase(folder, migrations))


class _SqliteDatabase:
    """Implements `Database` with a connection for writing and one for reading, which does not wait for the disk."""

    owner = 1
    """The same for all processes: the folder's lock leaves only one."""
    # Nobody else writes during a transaction.
    share = lock = ""
    keep_blob = "DO NOTHING"

    def __init__(self, folder: Path, migrations: Sequence[Sequence[str]]) -> None:
        self._path = folder / DATABASE_FILE
        self._lock = _lock_folder(folder)
        self._connections: list[_Connection] = []
        try:
            self._writer = self._connect()
            self._writer.migrate(migrations)
            self._reader = self._connect()
        except BaseException:
            self.close()
            raise

    def write(self, work: Callable[[Cursor], T]) -> T:
        """See `Database`."""
        with self._writer.transaction("BEGIN IMMEDIATE") as cursor:
            return work(cursor)

    def read(self, work: Callable[[Cursor], T]) -> T:
        """See `Database`."""
        with self._reader.transaction("BEGIN") as cursor:
            return work(cursor)

    def is_alive(self, cursor: Cursor, owner: int) -> bool:
        """See `Database`."""
        return False

    def close(self) -> None:
        """See `Database`."""
        while self._connections:
            self._connections.pop().close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _connect(self) -> _Connection:
        connection = _Connection(self._path)
        self._connections.append(connection)
        return connection


class _Connection:
    """A connection that one thread at a time uses."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mutex = threading.Lock()
        with self._explain_errors():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # its other files get the same mode
            self._connection: sqlite3.Connection | None = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=30
            )
            for setting in _SETTINGS:
                self._connection.execute(f"PRAGMA {setting}")

    @contextmanager
    def transaction(self, begin: str) -> Iterator[Cursor]:
        """Commit what the block does, or nothing if it fails."""
        with self._mutex, self._explain_errors():
            if self._connection is None:
                raise StoreError(f"{self._path} is closed: open the store again")
            self._connection.execute(begin)
            try:
                yield Cursor(self._connection.cursor())
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def migrate(self, migrations: Sequence[Sequence[str]]) -> None:
        """Make the tables of our version, in one transaction."""
        with self.transaction("BEGIN IMMEDIATE") as cursor:
            cursor.execute("PRAGMA user_version")
            version = cursor.fetch_one()[0]
            for statement in find_statements(version, names=_TYPES, place=str(self._path), migrations=migrations):
                cursor.execute(statement)
            if version < len(migrations):
                cursor.execute(f"PRAGMA user_version = {len(migrations)}")

    def close(self) -> None:
        """Close it, after the transaction that another thread is in."""
        with self._mutex:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self._path} cannot be used: {error}") from error


def _lock_folder(folder: Path) -> int | None:
    """Open and lock the folder's lock file, which is never removed."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise InvalidInputError(f"store must be a folder that can be written, got {folder}: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "another"
        os.close(descriptor)
        raise StoreError(
            f"store must be a folder that no other process uses, and process {holder} uses {folder}: end it, give "
            "another folder, or use a postgresql:// URL, which several gateways can share"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise StoreError(
            f"store must be a folder on a disk with file locks, and {folder} cannot be locked: {error}"
        ) from error
    return descriptor
