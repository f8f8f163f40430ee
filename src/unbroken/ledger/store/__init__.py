"""Durable storage of sessions: SQLite in a folder, or PostgreSQL (docs/design/0013-sessions.md).

`open_store` and `open_store_reader` take a location as people write it, and so do `open_database` and `open_snapshots`,
for `Tables` of another package.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import cast

from unbroken.errors import InvalidInputError, missing_extra
from unbroken.ledger.store.base import SessionStore
from unbroken.ledger.store.reader import StoreReader, StoreSnapshots
from unbroken.ledger.store.sql import Cursor, Database, SessionWriter, SqlSessionStore, is_storable
from unbroken.ledger.store.sqlite import SqliteDatabase, open_sqlite_snapshots
from unbroken.ledger.store.tables import SESSION_TABLES, Tables

__all__ = [
    "Cursor",
    "Database",
    "SessionStore",
    "SessionWriter",
    "StoreReader",
    "StoreSnapshots",
    "Tables",
    "is_postgres_url",
    "is_storable",
    "open_database",
    "open_snapshots",
    "open_store",
    "open_store_reader",
]


def open_store(location: str, *, advertised: str | None = None) -> SessionStore:
    """Open the store at `location`: a folder (SQLite), which is made if it is missing, or a `postgresql://` URL.

    `advertised` is the URL of this process, which those that share a database find (`SessionStore.find_owner_url`).

    Raises:
        InvalidInputError: it is neither, or the folder cannot be written.
        StoreError: it cannot be opened: another process uses the folder, the server does not answer, or its sessions
            are of a later version.
    """
    return SqlSessionStore(open_database(location, SESSION_TABLES, advertised=advertised))


def open_store_reader(location: str) -> StoreReader:
    """Open the store at `location` to read it, also while gateways use it; nothing of it is changed.

    Raises:
        InvalidInputError: there is no store.
        StoreError: it cannot be opened: the server does not answer, or its sessions are of another version.
    """
    return StoreReader(open_snapshots(location, SESSION_TABLES))


def open_database(location: str, tables: Tables, *, advertised: str | None = None) -> Database:
    """Open a database with these tables at `location`, and make them, or migrate those of an earlier version. Raises as
    `open_store` does.
    """
    if is_postgres_url(location):
        return cast(Database, _import_postgres().PostgresDatabase(location, tables, advertised))
    return SqliteDatabase(_get_folder(location), tables)


def open_snapshots(location: str, tables: Tables) -> StoreSnapshots:
    """Open a database to read these tables of `location`. Raises as `open_store_reader` does."""
    if is_postgres_url(location):
        return cast(StoreSnapshots, _import_postgres().open_postgres_snapshots(location, tables))
    return open_sqlite_snapshots(_get_folder(location), tables)


def is_postgres_url(location: str) -> bool:
    """Whether a location is that of a PostgreSQL database."""
    return location.startswith(("postgresql://", "postgres://"))


def _get_folder(location: str) -> Path:
    scheme, separator, _ = location.partition("://")
    if separator:
        raise InvalidInputError(f"store must be a folder or a postgresql:// URL, got one that begins with {scheme}://")
    if not location:
        raise InvalidInputError("store must be a folder or a postgresql:// URL, got ''")
    return Path(location)


def _import_postgres() -> ModuleType:
    try:
        import unbroken.ledger.store.postgres as postgres
    except ImportError as error:
        raise missing_extra(error, "store is a postgresql:// URL, which needs psycopg", "postgres") from error
    return postgres
