"""Open a store by its location, as people write it."""

from __future__ import annotations

from pathlib import Path

from unbroken.errors import InvalidInputError
from unbroken.ledger.store.base import SessionStore
from unbroken.ledger.store.sqlite import open_sqlite_store


def open_store(location: str) -> SessionStore:
    """Open the store at `location`: a folder (SQLite), which is made if it is missing, or a `postgresql://` URL.

    Raises:
        InvalidInputError: it is neither, or the folder cannot be written.
        StoreError: it cannot be opened: another process uses the folder, the server does not answer, or its sessions
            are of a later version.
    """
    scheme, separator, _ = location.partition("://")
    if scheme in ("postgresql", "postgres") and separator:
        return _open_postgres(location)
    if separator:
        raise InvalidInputError(f"store must be a folder or a postgresql:// URL, got one that begins with {scheme}://")
    if not location:
        raise InvalidInputError("store must be a folder or a postgresql:// URL, got ''")
    return open_sqlite_store(Path(location))


def _open_postgres(url: str) -> SessionStore:
    try:
        from unbroken.ledger.store.postgres import open_postgres_store
    except ImportError as error:
        raise InvalidInputError(
            f"store is a postgresql:// URL, which needs psycopg: pip install 'unbroken[postgres]' ({error})"
        ) from None
    return open_postgres_store(url)
