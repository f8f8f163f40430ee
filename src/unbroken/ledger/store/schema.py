"""The tables of a store, and how those of an earlier version become ours (docs/design/0013-sessions.md).

Both databases have the same tables; a few types have other names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unbroken.errors import StoreError

_VERSION_1 = (
    """
    CREATE TABLE sessions (
        session {key},
        session_id TEXT NOT NULL UNIQUE,
        key_digest {blob} NOT NULL UNIQUE,
        created_s {float} NOT NULL,
        expires_s {float} NOT NULL,
        status TEXT NOT NULL,
        settings TEXT NOT NULL,
        outcome TEXT,
        owner {integer} NOT NULL
    )
    """,
    "CREATE INDEX open_sessions ON sessions (expires_s) WHERE status = 'open'",
    """
    CREATE TABLE messages (
        session {integer} NOT NULL REFERENCES sessions ON DELETE CASCADE,
        node {integer} NOT NULL,
        parent {integer},
        sampled {integer} NOT NULL,
        message TEXT NOT NULL,
        delivered TEXT,
        PRIMARY KEY (session, node)
    )
    """,
    """
    CREATE TABLE turns (
        session {integer} NOT NULL REFERENCES sessions ON DELETE CASCADE,
        number {integer} NOT NULL,
        choice {integer} NOT NULL,
        tree {integer} NOT NULL,
        prompt_node {integer} NOT NULL,
        reply_node {integer} NOT NULL,
        tools_key TEXT NOT NULL,
        options TEXT NOT NULL,
        given_parent_node {integer},
        given_parent_offset {integer},
        given_origin TEXT,
        given_ids {blob},
        given_message_indices {blob},
        given_images TEXT,
        parent_node {integer} NOT NULL,
        parent_offset {integer} NOT NULL,
        completion_ids {blob} NOT NULL,
        rollout_logprobs {blob} NOT NULL,
        version_spans {blob} NOT NULL,
        finish_reason TEXT NOT NULL,
        temperature {float} NOT NULL,
        continued TEXT,
        fork TEXT,
        refusal TEXT,
        tolerances TEXT NOT NULL,
        request_digest {blob} NOT NULL,
        idempotency_key TEXT,
        answer_id TEXT NOT NULL,
        created_s {float} NOT NULL,
        PRIMARY KEY (session, number, choice)
    )
    """,
    """
    CREATE TABLE counters (
        session {integer} NOT NULL REFERENCES sessions ON DELETE CASCADE,
        name TEXT NOT NULL,
        total {integer} NOT NULL,
        PRIMARY KEY (session, name)
    )
    """,
    "CREATE TABLE blobs (sha256 {blob} PRIMARY KEY, data {blob} NOT NULL)",
    """
    CREATE TABLE session_blobs (
        session {integer} NOT NULL REFERENCES sessions ON DELETE CASCADE,
        kind TEXT NOT NULL,
        name TEXT NOT NULL,
        sha256 {blob} NOT NULL REFERENCES blobs,
        PRIMARY KEY (session, kind, name)
    )
    """,
    "CREATE INDEX blob_sessions ON session_blobs (sha256)",
)
"""Arrays are blobs of little-endian int32 or float32, JSON is TEXT, and `blobs` has images and tools."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (_VERSION_1,)
"""The statements that make version k + 1 of version k; version 0 is an empty database. Only ever appended to."""


def find_statements(
    version: int, *, names: Mapping[str, str], place: str, migrations: Sequence[Sequence[str]] = MIGRATIONS
) -> list[str]:
    """The statements that make our version of a database of `version`, with a database's `names` of types.

    Raises:
        StoreError: the database at `place` is of a later version than we know.
    """
    _check_known(version, len(migrations), place)
    return [statement.format_map(names) for step in migrations[version:] for statement in step]


def check_version(version: int, *, place: str) -> None:
    """Raise `StoreError` if a database of `version` at `place` cannot be read as it is."""
    _check_known(version, len(MIGRATIONS), place)
    if version < len(MIGRATIONS):
        raise StoreError(
            f"{place} has sessions of schema version {version}, and this release reads version {len(MIGRATIONS)}: a "
            "gateway of this release brings them up to date when it starts with this store"
        )


def _check_known(version: int, latest: int, place: str) -> None:
    if version > latest:
        raise StoreError(
            f"{place} has sessions of schema version {version}, and this release knows versions up to {latest}: use "
            "the release that wrote them, or a later one"
        )
