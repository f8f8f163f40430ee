"""Sessions in a folder: a SQLite database that one process at a time writes to. Other `Tables` have other files.

FOLDER/sessions.sqlite3    the database (and its -wal and -shm while it is in use)
FOLDER/lock                locked by the process that uses it, with its number; free as soon as that ends in any way

A reader takes the database as it is: also while a gateway writes, and after it was killed. What has to be read depends
on the database's log, `sessions.sqlite3-wal`:

log        its index (-shm)    read
none       -                   the database, read as unchanging; read again if it changed
there      there               the database and the log, with an index that is read only
there      none                a copy of both: SQLite would make an index in the folder

So no file is made, written, truncated or removed, and a gateway never waits. (SQLite removes an empty log and its index
when a gateway ends; what a killed one leaves is a log with an index.)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from unbroken.errors import InvalidInputError, StoreError
from unbroken.ledger.store.reader import StoreSnapshots, StoreState
from unbroken.ledger.store.sql import Cursor
from unbroken.ledger.store.tables import SESSION_TABLES, Tables, check_version, find_statements

T = TypeVar("T")
DATABASE_FILE = SESSION_TABLES.file
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


class SqliteDatabase:
    """Implements `Database` with a connection for writing and one for reading, which does not wait for the disk."""

    owner = 1
    """The same for all processes: the folder's lock leaves only one."""
    # Nobody else writes during a transaction.
    share = lock = ""
    keep_blob = "DO NOTHING"

    def __init__(self, folder: Path, tables: Tables) -> None:
        """Open it; the folder is made if it is missing, and tables of an earlier version are migrated.

        Raises:
            InvalidInputError: the folder cannot be written.
            StoreError: another process uses it, its tables are of a later version, or it is damaged.
        """
        if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
            oldest = ".".join(map(str, _OLDEST_SQLITE))
            raise StoreError(f"{tables.content} need SQLite {oldest} or later, and Python has {sqlite3.sqlite_version}")
        self._path = folder / tables.file
        self._lock = _lock_folder(folder, tables)
        self._connections: list[_Connection] = []
        try:
            self._writer = self._connect()
            self._writer.migrate(tables)
            self._reader = self._connect()
        except BaseException:
            self.close()
            raise

    def write(self, work: Callable[[Cursor], T], *, waits_for_disk: bool = True) -> T:
        """Call `work` in one transaction, which is on disk when this returns, or with the next that waits."""
        with self._writer.transaction("BEGIN IMMEDIATE", waits_for_disk=waits_for_disk) as cursor:
            return work(cursor)

    def read(self, work: Callable[[Cursor], T]) -> T:
        """Call `work`, whose statements all see the data of one moment."""
        with self._reader.transaction("BEGIN") as cursor:
            return work(cursor)

    def is_alive(self, cursor: Cursor, owner: int) -> bool:
        """Whether the process of another `owner` still runs."""
        return False

    def find_url(self, cursor: Cursor, owner: int) -> str | None:
        """The URL of another `owner`, while its process runs."""
        return None

    def close(self) -> None:
        """Disconnect."""
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
            try:
                for setting in _SETTINGS:
                    self._connection.execute(f"PRAGMA {setting}")
            except BaseException:
                self._connection.close()
                raise
        self._waits_for_disk = True

    @contextmanager
    def transaction(self, begin: str, *, waits_for_disk: bool = True) -> Iterator[Cursor]:
        """Commit what the block does, or nothing if it fails."""
        with self._mutex, self._explain_errors():
            if self._connection is None:
                raise StoreError(f"{self._path} is closed: open the store again")
            if self._waits_for_disk != waits_for_disk:
                self._connection.execute(f"PRAGMA synchronous = {'FULL' if waits_for_disk else 'NORMAL'}")
                self._waits_for_disk = waits_for_disk
            self._connection.execute(begin)
            try:
                yield Cursor(self._connection.cursor())
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def migrate(self, tables: Tables) -> None:
        """Make the tables of our version, in one transaction."""
        with self.transaction("BEGIN IMMEDIATE") as cursor:
            (version,) = cursor.find("PRAGMA user_version")
            for statement in find_statements(version, tables, names=_TYPES, place=str(self._path)):
                cursor.execute(statement)
            if version < len(tables.migrations):
                cursor.execute(f"PRAGMA user_version = {len(tables.migrations)}")

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


def _lock_folder(folder: Path, tables: Tables) -> int | None:
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
        shared = ", or use a postgresql:// URL, which several gateways can share" if tables.is_shared else ""
        raise StoreError(
            f"store must be a folder that no other process uses, and process {holder} uses {folder}: end it"
            f"{',' if shared else ' or'} give another folder{shared}"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise StoreError(
            f"store must be a folder on a disk with file locks, and {folder} cannot be locked: {error}"
        ) from error
    return descriptor


_MAX_ATTEMPTS = 40
_PAUSE_S = 0.025
_INDEX_BYTES = 8
"""Shorter ones are being made."""


def open_sqlite_snapshots(folder: Path, tables: Tables) -> StoreSnapshots:
    """Open the database in a folder to read it.

    Raises:
        InvalidInputError: the folder has none, or a link in place of one of its files.
    """
    if not (folder / tables.file).is_file():
        raise InvalidInputError(f"store must be a folder with {tables.file}, got {folder}")
    for name in (tables.file, f"{tables.file}-wal", f"{tables.file}-shm", LOCK_FILE):
        if (folder / name).is_symlink():
            raise InvalidInputError(f"store must be a folder of files, but {folder / name} is a link")
    return _SqliteSnapshots(folder, tables)


class _ChangedError(Exception):
    """Somebody wrote in the meantime."""


class _SqliteSnapshots:
    """Implements `StoreSnapshots`; between two calls nothing is open."""

    def __init__(self, folder: Path, tables: Tables) -> None:
        self._lock = folder / LOCK_FILE
        self._tables = tables
        self._path = folder.resolve() / tables.file
        self._log = self._path.with_name(f"{tables.file}-wal")
        self._index = self._path.with_name(f"{tables.file}-shm")

    def read(self, work: Callable[[Cursor], T]) -> T:
        """Call `work`, whose statements all see the data of one moment."""
        for attempt in range(_MAX_ATTEMPTS):
            try:
                with self._open() as connection:
                    return _read(connection, work, self._tables, place=str(self._path))
            except (_ChangedError, sqlite3.Error, OSError) as error:
                # A gateway may have begun, written or ended at this moment.
                if attempt == _MAX_ATTEMPTS - 1:
                    raise StoreError(f"{self._path} cannot be read: {error}") from error
                time.sleep(_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    def find_state(self) -> StoreState:
        """Whether a gateway works on it.

        A gateway that ends removes the log; the lock has the number of the last one's process.
        """
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
        """A text that is another one after a change."""
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
                copy = Path(folder) / self._path.name
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


def _read(connection: sqlite3.Connection, work: Callable[[Cursor], T], tables: Tables, *, place: str) -> T:
    connection.execute("BEGIN")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    check_version(version, tables, place=place)
    programs = "type IN ('view', 'trigger') OR sql LIKE 'CREATE VIRTUAL%' OR sql LIKE '% AS (%'"
    if (found := connection.execute(f"SELECT name FROM sqlite_master WHERE {programs}").fetchone()) is not None:
        raise StoreError(f"{place} must have tables only, which {tables.program}s make, but {found[0]!r} is computed")
    return work(Cursor(connection.cursor()))


def _sign(path: Path) -> tuple[int, int]:
    """Time and size of a file; (0, 0) if it does not exist."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size
