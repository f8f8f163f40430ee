"""Sessions in PostgreSQL, in their own schema: several gateways share them, each session owned by one at a time.

A gateway is an owner with a number, whose advisory lock it holds for as long as its connection lives. Its URL is that
connection's `application_name`, so that it is known for as long. A session names its owner. If that owner's lock is
free, its gateway has ended or was cut off, and another may take the session over. A gateway that was cut off connects
again under its number, and has lost what was taken over: each commit checks the session's owner.

Other `Tables` have other schemas. Those that are not shared have one owner, number 1; another process is refused
while it holds the lock, and one that was cut off is refused for good once another has taken it.

The lock belongs to a connection, so a pooler in between must not share connections among clients.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from unbroken.errors import InvalidInputError, NoStoreError, StoreError
from unbroken.ledger.store.reader import StoreSnapshots, StoreState
from unbroken.ledger.store.sql import Cursor
from unbroken.ledger.store.tables import Tables, check_version, find_statements

T = TypeVar("T")
_TYPES = {
    "key": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "integer": "BIGINT",
    "float": "DOUBLE PRECISION",
    "blob": "BYTEA",
}
_OLDEST_SERVER = 13
"""The first with `pg_current_xact_id`."""
# An advisory lock's name is `Tables.locks` and an owner, or 0 while tables are made.
_IS_OWNER = (
    "locktype = 'advisory' AND classid = ?::oid AND objid = ?::oid AND mode = 'ExclusiveLock' AND granted "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_PLACE = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
}
"""Defaults for what a URL leaves out: a server whose machine does not answer is given up after 25 seconds."""
_SETTINGS = {
    "tcp_keepalives_idle": "10",  # the server finds the end of a gateway whose machine is gone in 25 seconds
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25000",
    "idle_session_timeout": "0",
}
_IN_THE_WAY = (
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
    psycopg.errors.ForeignKeyViolation,  # an image's last session was deleted, or it got a new one, at the same time
)
"""Errors that another transaction caused, and that are gone in the next attempt."""
_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_MAX_ATTEMPTS = 3
_WAIT_S = 10.0
"""How long an earlier connection of ours may take to end."""


def open_postgres_snapshots(url: str, tables: Tables) -> StoreSnapshots:
    """Open a database to read these tables, in transactions that are read only.

    Raises:
        InvalidInputError: the URL cannot be parsed.
        NoStoreError: it does not have them.
        StoreError: it cannot be connected to, or has them in another version.
    """
    snapshots = _PostgresSnapshots(url, tables)
    snapshots.find_revision()
    return snapshots


class PostgresDatabase:
    """Implements `Database` with a connection for writing, which holds the owner's lock, and one for reading."""

    share = "FOR SHARE"
    """A session is not finished while a turn is committed to it."""
    lock = "FOR UPDATE"
    keep_blob = "DO UPDATE SET sha256 = excluded.sha256"
    """Locks the row; its data are not written again."""

    def __init__(self, url: str, tables: Tables, advertised: str | None = None) -> None:
        """Open it; the schema is made if it is missing, or migrated. `advertised` is a URL of this process.

        Raises:
            InvalidInputError: the URL cannot be parsed.
            StoreError: it cannot be connected to, its tables are of a later version, or not shared and in use.
        """
        place = _parse(url)
        self._locks = tables.locks
        self._writer = _Connection(place if advertised is None else {**place, "application_name": advertised}, tables)
        self._reader = _Connection(place, tables)
        try:
            self._writer.run(lambda cursor: _migrate(cursor, str(self._writer), tables))
            self.owner: int = self._writer.run(lambda cursor: _choose_owner(cursor, tables))
            self._writer.owner = self.owner
        except BaseException:
            self.close()
            raise

    def write(self, work: Callable[[Cursor], T], *, waits_for_disk: bool = True) -> T:
        """Call `work` in one transaction, which is on disk when this returns, or soon after."""

        def write(cursor: Cursor) -> T:
            if not waits_for_disk:
                cursor.execute("SET LOCAL synchronous_commit = off")
            return work(cursor)

        return self._writer.run(write)

    def read(self, work: Callable[[Cursor], T]) -> T:
        """Call `work`, whose statements all see the data of one moment."""
        return self._reader.run(work, begin=_SNAPSHOT)

    def is_alive(self, cursor: Cursor, owner: int) -> bool:
        """Whether the process of another `owner` still runs."""
        return not cursor.find("SELECT pg_try_advisory_xact_lock_shared(?::int, ?::int)", self._locks, owner)[0]

    def find_url(self, cursor: Cursor, owner: int) -> str | None:
        """The URL of another `owner`, while its process runs."""
        of_owner = f"pid = (SELECT pid FROM pg_locks WHERE {_IS_OWNER})"
        found = cursor.find(f"SELECT application_name FROM pg_stat_activity WHERE {of_owner}", self._locks, owner)
        (name,) = found or ("",)
        return name if name.startswith(("http://", "https://")) else None

    def close(self) -> None:
        """Disconnect."""
        self._writer.close()
        self._reader.close()


class _PostgresSnapshots:
    """Implements `StoreSnapshots`; between two calls there is no connection."""

    def __init__(self, url: str, tables: Tables) -> None:
        self._place = _parse(url)
        self._tables = tables

    def read(self, work: Callable[[Cursor], T]) -> T:
        """Call `work`, whose statements all see the data of one moment."""
        connection = _Connection(self._place, self._tables)

        def check_and_work(cursor: Cursor) -> T:
            if cursor.find(f"SELECT to_regclass('{self._tables.schema}.schema_version') IS NULL")[0]:
                raise NoStoreError(f"{connection} has no store: no {self._tables.program} has used it")
            (version,) = cursor.find("SELECT version FROM schema_version")
            check_version(version, self._tables, place=str(connection))
            return work(cursor)

        try:
            return connection.run(check_and_work, begin=_SNAPSHOT)
        finally:
            connection.close()

    def find_state(self) -> StoreState:
        """Whether a gateway works on it. Which gateway died is not known: its sessions are taken over."""
        statement = (
            "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND classid = ?::oid "
            "AND objid <> 0 AND mode = 'ExclusiveLock' AND granted "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"
        )
        (is_running,) = self.read(lambda cursor: cursor.find(statement, self._tables.locks))
        return StoreState.RUNNING if is_running else StoreState.ENDED

    def find_revision(self) -> str:
        """A text that is another one after a change."""
        found = tuple(self.read(lambda cursor: cursor.find(self._tables.revision)))
        return f"{found!r} {self.find_state().value}"


class _Connection:
    """A connection that one thread at a time uses, and that is made again when it was lost."""

    def __init__(self, place: dict[str, Any], tables: Tables) -> None:
        self._place = place
        self._tables = tables
        self._mutex = threading.Lock()
        self._connection: Any = None
        self._process = 0
        """The server's process for it, or for the one before."""
        self._closed = False
        self.owner: int | None = None
        """The owner whose lock it holds, also after it was lost and made again."""

    def __str__(self) -> str:
        host, port = self._place.get("host", "localhost"), self._place.get("port", 5432)
        return f"the PostgreSQL database {self._place.get('dbname')!r} on {host}:{port}"

    def run(self, work: Callable[[Cursor], T], *, begin: str = "BEGIN ISOLATION LEVEL READ COMMITTED") -> T:
        """Call `work` in a transaction; again if the connection was lost, or others' transactions were in the way.

        If it was lost during the commit, the server says afterwards whether the transaction was committed.
        """
        with self._mutex, self._explain_errors():
            for _ in range(_MAX_ATTEMPTS - 1):
                transaction = _Transaction(begin, has_number=self.owner is not None)
                try:
                    return transaction.run(self._get(), work)
                except psycopg.Error as error:
                    if not self._may_try_again(error):
                        raise
                if transaction.was_sent and self._was_committed(transaction):
                    result: T = transaction.result
                    return result
            return _Transaction(begin, has_number=False).run(self._get(), work)

    def close(self) -> None:
        """Close it, after the transaction that another thread is in. Its owner's lock is free when this returns."""
        with self._mutex:
            self._closed = True
            if self._connection is None:
                return
            if self.owner is not None:
                with suppress(psycopg.Error):  # it may be lost
                    self._connection.execute("SELECT pg_advisory_unlock_all()")
            self._connection.close()

    def _get(self) -> Any:
        """The connection, made again if it was lost. A server that is being started again is waited for."""
        if self._closed:
            raise StoreError(f"{self} is closed: open the store again")
        end = time.monotonic() + (0 if self._connection is None else _WAIT_S)
        while self._connection is None or self._connection.closed:
            try:
                connection = self._connect()
                if self.owner is not None:
                    self._lock_again(connection)
                self._connection, self._process = connection, connection.info.backend_pid
            except psycopg.OperationalError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.2)
        return self._connection

    def _connect(self) -> Any:
        connection = psycopg.connect(make_conninfo(**self._place), autocommit=True)
        version, encoding = connection.info.server_version // 10000, connection.info.parameter_status("server_encoding")
        if version < _OLDEST_SERVER or encoding != "UTF8":
            connection.close()
            needs = f"PostgreSQL {_OLDEST_SERVER} or later and a database with the encoding UTF8"
            raise StoreError(f"{self._tables.content} need {needs}, and {self} is {version} with {encoding}")
        known = "SELECT set_config(name, %s, false) FROM pg_settings WHERE name = %s"
        for name, value in {**_SETTINGS, "search_path": self._tables.schema}.items():
            connection.execute(known, (value, name))
        connection.execute(f"{known} AND setting = 'off'", ("on", "synchronous_commit"))  # others are stronger
        return connection

    def _lock_again(self, connection: Any) -> None:
        """Take the owner's lock back from the connection before, which the server may not have given up yet."""
        names, end = (self._tables.locks, self.owner), time.monotonic() + _WAIT_S
        # A number of ours that is shared out has no other holder; the one number of other tables may.
        is_ours = "true" if self._tables.is_shared else f"pid = {self._process}"
        while not connection.execute("SELECT pg_try_advisory_lock(%s::int, %s::int)", names).fetchone()[0]:
            if time.monotonic() > end:
                connection.close()
                raise StoreError(
                    f"owner {self.owner} of the {self._tables.content} in {self} is another process now, or still "
                    "connected through an earlier connection"
                )
            found = f"SELECT pg_terminate_backend(pid) FROM pg_locks WHERE {_IS_OWNER.replace('?', '%s')} AND {is_ours}"
            connection.execute(found, names)
            time.sleep(0.05)

    def _was_committed(self, transaction: _Transaction) -> bool:
        """Whether a transaction was committed although its COMMIT had no answer."""
        status = self._get().execute("SELECT pg_xact_status(%s::xid8)", (transaction.number,)).fetchone()[0]
        return bool(status == "committed")

    def _may_try_again(self, error: psycopg.Error) -> bool:
        if isinstance(error, _IN_THE_WAY):
            return True
        return self._connection is not None and bool(self._connection.closed)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise StoreError(f"{self} cannot be used: {' '.join(str(error).split())}") from error


class _Transaction:
    """One attempt at a transaction."""

    def __init__(self, begin: str, *, has_number: bool) -> None:
        self._begin = begin
        self._has_number = has_number
        self.number: str | None = None
        """The server's name for it."""
        self.result: Any = None
        self.was_sent = False
        """Whether its COMMIT was sent, so that it may be committed even if there was no answer."""

    def run(self, connection: Any, work: Callable[[Cursor], T]) -> T:
        """Commit what `work` does, or nothing if it fails."""
        with connection.cursor() as driver_cursor:
            try:
                if self._has_number:
                    driver_cursor.execute(f"{self._begin}; SELECT pg_current_xact_id()::text")
                    driver_cursor.nextset()
                    (self.number,) = driver_cursor.fetchone()
                else:
                    driver_cursor.execute(self._begin)
                self.result = work(Cursor(driver_cursor, mark="%s"))
                self.was_sent = self._has_number
                driver_cursor.execute("COMMIT")
            except BaseException:
                if not connection.closed:
                    driver_cursor.execute("ROLLBACK")
                raise
        result: T = self.result
        return result


def _parse(url: str) -> dict[str, Any]:
    """The parts of a URL. An error does not show it: where it cannot be parsed, any part may be of the password."""
    try:
        place = conninfo_to_dict(url)
    except psycopg.Error:
        place = {"dbname": "@"}
    has_port = str(place.get("port", "0")).replace(",", "").isdigit()
    if not has_port or "@" in f"{place.get('host', '')}{place.get('dbname', '')}":
        raise InvalidInputError(
            "store must be a folder or a URL postgresql://USER:PASSWORD@HOST:PORT/DATABASE, got a postgresql URL that "
            "cannot be parsed: write special characters in a password as %XX"
        )
    return {**_PLACE, **place}


def _migrate(cursor: Cursor, place: str, tables: Tables) -> None:
    """Make the tables of our version. Gateways that start at the same time wait for one another."""
    schema = tables.schema
    cursor.execute(f"SELECT pg_advisory_xact_lock({tables.locks}, 0)")
    are_missing = f"SELECT to_regclass('{schema}.schema_version') IS NULL, to_regnamespace('{schema}') IS NULL"
    is_new, has_no_schema = cursor.find(are_missing)
    if has_no_schema:
        cursor.execute(f"CREATE SCHEMA {schema}")
    if is_new:
        cursor.execute("CREATE TABLE schema_version (version INTEGER NOT NULL)")
        cursor.execute("INSERT INTO schema_version VALUES (0)")
        cursor.execute("CREATE SEQUENCE owners AS INTEGER CYCLE")
    (version,) = cursor.find("SELECT version FROM schema_version")
    for statement in find_statements(version, tables, names=_TYPES, place=place):
        cursor.execute(statement)
    if version < len(tables.migrations):
        cursor.execute("UPDATE schema_version SET version = ?", (len(tables.migrations),))


def _choose_owner(cursor: Cursor, tables: Tables) -> int:
    """Take a number that no gateway has, and its lock, which this connection holds until it ends. There is one number
    for tables that are not shared.
    """
    number = "nextval('owners')::int" if tables.is_shared else "1"
    while True:
        take = f"SELECT n, pg_try_advisory_lock({tables.locks}, n) FROM (SELECT {number} AS n) AS next"
        owner, is_free = cursor.find(take)
        if is_free:
            return int(owner)
        if not tables.is_shared:
            raise StoreError(f"store must be a database that no other process uses for {tables.content}, and one does")
