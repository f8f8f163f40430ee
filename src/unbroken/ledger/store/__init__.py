"""Durable storage of sessions: SQLite in a folder, or PostgreSQL (docs/design/0013-sessions.md)."""

from unbroken.ledger.store.base import SessionStore
from unbroken.ledger.store.opening import open_store
from unbroken.ledger.store.writer import SessionWriter

__all__ = ["SessionStore", "SessionWriter", "open_store"]
