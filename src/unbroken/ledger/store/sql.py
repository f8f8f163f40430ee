"""The SessionStore over a `Database`: all statements, which SQLite and PostgreSQL share, and where they differ.

`SessionWriter` gathers the commits of many sessions for one transaction, so that they share its wait for the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from unbroken.errors import InvariantError, NotOwnerError, SessionEndedError, StoreError, UnknownSessionError
from unbroken.ledger.records import SessionRecord, SessionStatus, StoredSession, TurnCommit
from unbroken.ledger.store.base import SessionStore
from unbroken.ledger.store.tables import (
    MESSAGE_COLUMNS,
    SESSION_COLUMNS,
    STREAM_COLUMNS,
    TURN_COLUMNS,
    decode_message,
    decode_session,
    decode_stream,
    decode_turn,
    encode_json,
    encode_message,
    encode_session,
    encode_stream,
    encode_turn,
)

T = TypeVar("T")


class Cursor:
    """A cursor of a database driver inside a transaction. In a statement, the place of a value is `?`."""

    def __init__(self, cursor: Any, *, mark: str = "?") -> None:
        """Wrap the driver's cursor, which has `mark` in the places of values."""
        self._cursor = cursor
        self._mark = mark

    def execute(self, statement: str, values: Sequence[Any] = ()) -> None:
        """Run a statement."""
        self._cursor.execute(statement.replace("?", self._mark), values)

    def execute_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run a statement for each row; nothing happens without rows."""
        if rows:
            self._cursor.executemany(statement.replace("?", self._mark), rows)

    def find(self, statement: str, *values: Any) -> Any:
        """Run a statement, and return the first row of its result as a tuple; None if it has none."""
        self.execute(statement, values)
        return self._cursor.fetchone()

    def select(self, statement: str, *values: Any) -> list[Any]:
        """Run a statement, and return the rows of its result as tuples."""
        self.execute(statement, values)
        rows: list[Any] = self._cursor.fetchall()
        return rows

    @property
    def num_changed(self) -> int:
        """Number of rows that the last statement changed."""
        return int(self._cursor.rowcount)


class Database(Protocol):
    """A database with the tables of `schema`, and this process as one owner of sessions.

    `write` and `read` raise `StoreError` for each error of the database.
    """

    owner: int
    """Names this process in the sessions that it owns."""
    share: str
    """Ends a SELECT whose rows must not change before the transaction ends."""
    lock: str
    """Ends a SELECT whose rows no other transaction may use before this one ends."""
    keep_blob: str
    """What an INSERT does with a blob that is there already, which must not be removed before the transaction ends."""

    def write(self, work: Callable[[Cursor], T], *, waits_for_disk: bool = True) -> T:
        """Call `work` in one transaction, which is on disk when this returns. It may be called twice.

        Without `waits_for_disk` it outlives this process, and is on disk with the next transaction that is.
        """

    def read(self, work: Callable[[Cursor], T]) -> T:
        """Call `work`, whose statements all see the data of one moment."""

    def is_alive(self, cursor: Cursor, owner: int) -> bool:
        """Whether the process of another `owner` still runs."""

    def find_url(self, cursor: Cursor, owner: int) -> str | None:
        """The URL of another `owner`, while its process runs."""

    def close(self) -> None:
        """Disconnect. Nothing happens if it is closed."""


_MAX_GROUP = 256
"""Most commits of one transaction."""
_NO_OWNER = 0
_IMAGE, _TOOLS = "image", "tools"
"""Kinds of blobs. An image's name is its SHA-256, that of tools their key."""
_SESSION = ", ".join(SESSION_COLUMNS)
_MAX_NAMED = 500
"""Most sessions that one statement names: databases limit its parameters."""
_COMMITTED = {
    "session_blobs": (("kind", "name", "sha256"), "ON CONFLICT DO NOTHING"),
    "messages": (MESSAGE_COLUMNS, ""),
    "turns": (TURN_COLUMNS, ""),
    "counters": (
        ("name", "total"),
        "ON CONFLICT (session, name) DO UPDATE SET total = counters.total + excluded.total",
    ),
    "streams": (STREAM_COLUMNS, ""),
    "conversations": (("name", "content"), "ON CONFLICT (session, name) DO UPDATE SET content = excluded.content"),
}
"""What a commit inserts: a table's columns after the session's number, and what happens to rows that exist already."""


class SqlSessionStore:
    """Implements `SessionStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, record: SessionRecord) -> None:
        """Store a new session, which this store then owns."""
        values = (*encode_session(record), self._database.owner)
        statement = _insert("sessions", (*SESSION_COLUMNS, "owner"))
        self._database.write(lambda cursor: cursor.execute(statement, values))

    def load(self, session_id: str) -> StoredSession | None:
        """Load a session as of one moment; None if it is unknown."""
        if not is_storable(session_id):
            return None
        return self._database.read(functools.partial(load_session, session_id))

    def load_record(self, session_id: str) -> SessionRecord | None:
        """Load a session without its turns; None if it is unknown."""
        row = self._read_one(f"SELECT {_SESSION} FROM sessions WHERE session_id = ?", session_id)
        return None if row is None else decode_session(row)

    def load_image(self, sha256: str) -> bytes | None:
        """Load the file of an image of any session; None if no session has it."""
        return self._database.read(functools.partial(load_image, sha256))

    def has_image(self, session_id: str, sha256: str) -> bool:
        """Whether a session refers to an image; false for an unknown session."""
        if not (is_storable(session_id) and is_storable(sha256)):
            return False
        condition = "WHERE session_id = ? AND kind = ? AND name = ?"
        statement = f"SELECT 1 FROM session_blobs JOIN sessions USING (session) {condition}"
        return self._database.read(lambda cursor: cursor.find(statement, session_id, _IMAGE, sha256)) is not None

    def find_by_key(self, key_digest: bytes) -> str | None:
        """Find the session that the SHA-256 of an API key belongs to."""
        row = self._read_one("SELECT session_id FROM sessions WHERE key_digest = ?", key_digest)
        return None if row is None else row[0]

    def list_sessions(
        self, *, status: SessionStatus | None = None, after: str | None = None, limit: int | None = None
    ) -> list[SessionRecord]:
        """List sessions in the order in which they were created: those after session `after`, at most `limit`."""

        def select(cursor: Cursor) -> list[SessionRecord]:
            number = 0 if after is None else _find(cursor, after, "session")[0]
            condition, values = "session > ?", [number]
            if status is not None:
                condition, values = f"{condition} AND status = ?", [*values, status.value]
            if limit is not None:
                condition, values = f"{condition} ORDER BY session LIMIT ?", [*values, limit]
            else:
                condition = f"{condition} ORDER BY session"
            rows = cursor.select(f"SELECT {_SESSION} FROM sessions WHERE {condition}", *values)
            return [decode_session(row) for row in rows]

        return self._database.read(select)

    def commit(self, commits: Sequence[TurnCommit]) -> None:
        """Store new turns of any sessions in one transaction; if one cannot be stored, none is."""
        encoded = [_EncodedCommit(commit) for commit in commits]
        # All transactions use this order, so that no two wait for each other.
        blobs = sorted({digest: data for each in encoded for digest, data in each.blobs.items()}.items())
        insert_blob = f"{_insert('blobs', ('sha256', 'data'))} ON CONFLICT (sha256) {self._database.keep_blob}"

        def write(cursor: Cursor) -> None:
            numbers = self._check_writable(cursor, [commit.session_id for commit in commits])
            cursor.execute_many(insert_blob, blobs)
            for each in encoded:
                each.check_images(cursor)
            for table, (columns, on_conflict) in _COMMITTED.items():  # one round trip for all commits
                rows = [(numbers[each.session_id], *row) for each in encoded for row in each.rows[table]]
                cursor.execute_many(f"{_insert(table, ('session', *columns))} {on_conflict}", rows)
            dropped = [(numbers[each.session_id], one) for each in commits for one in each.dropped_streams]
            cursor.execute_many("DELETE FROM streams WHERE session = ? AND answer_id = ?", dropped)

        if encoded:
            self._database.write(write, waits_for_disk=any(commit.waits_for_disk for commit in commits))

    def finish(self, session_id: str, status: SessionStatus, outcome: Mapping[str, Any] | None = None) -> None:
        """End an open session."""
        if status is SessionStatus.OPEN:
            raise InvariantError("status must be finished or expired, got open: a session is open from the start")
        values = (status.value, None if outcome is None else encode_json(outcome))

        def write(cursor: Cursor) -> None:
            (number,) = _find(cursor, session_id, "session")
            cursor.execute(
                "UPDATE sessions SET status = ?, outcome = ? WHERE session = ? AND status = 'open'", (*values, number)
            )
            if cursor.num_changed == 0:
                found = _find(cursor, session_id, "status, outcome")
                if tuple(found) != values:
                    raise SessionEndedError(session_id, found[0])

        self._database.write(write)

    def expire(self, now_s: float) -> list[str]:
        """End the open sessions whose time is over, and return their ids."""
        is_over = "status = 'open' AND expires_s <= ?"
        if self._read_one(f"SELECT 1 FROM sessions WHERE {is_over} LIMIT 1", now_s) is None:
            return []
        expire = f"UPDATE sessions SET status = 'expired' WHERE {is_over} RETURNING session_id"
        return [row[0] for row in self._database.write(lambda cursor: cursor.select(expire, now_s))]

    def find_ended(self, session_ids: Sequence[str]) -> list[str]:
        """Find those of these sessions that have ended or were deleted, by any gateway, in the same order."""

        def select(cursor: Cursor) -> set[str]:
            found: set[str] = set()
            for start in range(0, len(session_ids), _MAX_NAMED):
                names = session_ids[start : start + _MAX_NAMED]
                is_named = f"session_id IN ({', '.join('?' * len(names))})"
                rows = cursor.select(f"SELECT session_id FROM sessions WHERE status = 'open' AND {is_named}", *names)
                found.update(row[0] for row in rows)
            return found

        is_open = self._database.read(select)
        return [session_id for session_id in session_ids if session_id not in is_open]

    def delete(self, session_id: str) -> bool:
        """Remove a session, with the images that no other session has; returns whether there was one."""
        if self._read_one("SELECT 1 FROM sessions WHERE session_id = ?", session_id) is None:
            return False
        return self._database.write(functools.partial(_delete, session_id, self._database.lock))

    def acquire(self, session_id: str) -> bool:
        """Become or stay the owner of a session; False if another gateway that runs owns it."""
        me = self._database.owner
        if self._database.read(lambda cursor: _find(cursor, session_id, "owner"))[0] == me:
            return True

        def write(cursor: Cursor) -> bool:
            (owner,) = _find(cursor, session_id, "owner")
            if owner not in (me, _NO_OWNER) and self._database.is_alive(cursor, owner):
                return False
            # If another store acquires it at the same time, the owner has changed and this changes nothing.
            cursor.execute("UPDATE sessions SET owner = ? WHERE session_id = ? AND owner = ?", (me, session_id, owner))
            return cursor.num_changed == 1

        return self._database.write(write)

    def find_owner_url(self, session_id: str) -> str | None:
        """The URL of the gateway that owns a session, if that is another one that runs and has one."""
        if not is_storable(session_id):
            return None

        def select(cursor: Cursor) -> str | None:
            (owner,) = cursor.find("SELECT owner FROM sessions WHERE session_id = ?", session_id) or (_NO_OWNER,)
            return None if owner in (self._database.owner, _NO_OWNER) else self._database.find_url(cursor, owner)

        return self._database.read(select)

    def release(self, session_id: str) -> None:
        """Give up a session."""
        if not is_storable(session_id):
            return
        values = (_NO_OWNER, session_id, self._database.owner)
        statement = "UPDATE sessions SET owner = ? WHERE session_id = ? AND owner = ?"
        self._database.write(lambda cursor: cursor.execute(statement, values))

    def close(self) -> None:
        """Release all sessions and disconnect."""
        self._database.close()

    def _read_one(self, statement: str, value: Any) -> Any:
        if isinstance(value, str) and not is_storable(value):
            return None
        return self._database.read(lambda cursor: cursor.find(statement, value))

    def _check_writable(self, cursor: Cursor, session_ids: Sequence[str]) -> dict[str, int]:
        """The number of each session; they stay as they are until the transaction ends."""
        wanted = list(dict.fromkeys(session_ids))
        if not_storable := [session_id for session_id in wanted if not is_storable(session_id)]:
            raise UnknownSessionError(not_storable[0])
        condition = f"session_id IN ({', '.join('?' * len(wanted))}) {self._database.share}"
        rows = cursor.select(f"SELECT session_id, session, status, owner FROM sessions WHERE {condition}", *wanted)
        found = {session_id: rest for session_id, *rest in rows}
        for session_id in wanted:
            if session_id not in found:
                raise UnknownSessionError(session_id)
            _, status, owner = found[session_id]
            if status != SessionStatus.OPEN:
                raise SessionEndedError(session_id, status)
            if owner != self._database.owner:
                raise NotOwnerError(session_id)
        return {session_id: number for session_id, (number, _, _) in found.items()}


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
        is_last = False
        while not is_last:
            group, is_last = self._take()
            if not group:
                continue
            errors: list[Exception | None] = [None] * len(group)
            try:
                self._store.commit([waiting.commit for waiting in group])
            except Exception as error:  # of any kind: it belongs to the caller, and the thread continues
                errors = [error] if len(group) == 1 else [self._find_error(waiting.commit) for waiting in group]
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._resolve, group, errors)

    def _take(self) -> tuple[list[_Waiting], bool]:
        """Wait for a commit, and take those that wait with it; and whether there will be no more."""
        group: list[_Waiting] = []
        while len(group) < _MAX_GROUP:
            try:
                waiting = self._queue.get(block=not group)
            except queue.Empty:
                break
            if waiting is None:
                return group, True
            group.append(waiting)
        return group, False

    def _find_error(self, commit: TurnCommit) -> Exception | None:
        """Store one commit of a group that could not be stored as a whole; its error, if it cannot be stored either."""
        try:
            self._store.commit([commit])
        except Exception as error:
            return error
        return None

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


class _EncodedCommit:
    """A commit as rows, which are made before the transaction begins."""

    def __init__(self, commit: TurnCommit) -> None:
        self.session_id = commit.session_id
        tools = {key: encode_json(value).encode() for key, value in commit.tools.items()}
        digests = {key: hashlib.sha256(data).digest() for key, data in tools.items()}
        self._images = [(sha256, bytes.fromhex(sha256)) for sha256 in commit.image_sha256s]
        self.blobs = {digests[key]: data for key, data in tools.items()}
        self.blobs |= {_check_image(sha256, data): data for sha256, data in commit.images.items()}
        self.rows: dict[str, list[tuple[Any, ...]]] = {
            "session_blobs": [
                *((_TOOLS, key, digest) for key, digest in digests.items()),
                *((_IMAGE, sha256, digest) for sha256, digest in self._images),
            ],
            "messages": [encode_message(message) for message in commit.messages],
            "turns": [encode_turn(turn) for turn in commit.turns],
            "counters": [(name, times) for name, times in commit.counters.items() if times],
            "streams": [encode_stream(piece) for piece in commit.streamed],
            "conversations": [(name, encode_json(content)) for name, content in commit.conversations.items()],
        }
        """By table, as in `_COMMITTED`, without the session's number."""

    def check_images(self, cursor: Cursor) -> None:
        """Raise `StoreError` if an image is neither stored nor among this commit's blobs."""
        for sha256, digest in self._images:
            if cursor.find("SELECT 1 FROM blobs WHERE sha256 = ?", digest) is None:
                raise StoreError(
                    f"session {self.session_id!r} refers to the image sha256:{sha256}, which was never stored: "
                    "commit its bytes with it"
                )


def load_session(session_id: str, cursor: Cursor) -> StoredSession | None:
    """Load a session; None if it is unknown."""
    row = cursor.find(f"SELECT session, {_SESSION} FROM sessions WHERE session_id = ?", session_id)
    if row is None:
        return None
    session = row[0]

    def select(columns: Sequence[str], table: str, rest: str) -> list[Any]:
        return cursor.select(f"SELECT {', '.join(columns)} FROM {table} WHERE session = ? {rest}", session)

    tools = select(("name", "data"), "session_blobs JOIN blobs USING (sha256)", f"AND kind = '{_TOOLS}' ORDER BY name")
    return StoredSession(
        record=decode_session(row[1:]),
        messages=tuple(map(decode_message, select(MESSAGE_COLUMNS, "messages", "ORDER BY node"))),
        turns=tuple(map(decode_turn, select(TURN_COLUMNS, "turns", "ORDER BY number, choice"))),
        tools={name: tuple(json.loads(bytes(data))) for name, data in tools},
        counters=dict(select(("name", "total"), "counters", "ORDER BY name")),
        streamed=tuple(map(decode_stream, select(STREAM_COLUMNS, "streams", "ORDER BY piece"))),
        conversations={
            name: json.loads(content) for name, content in select(("name", "content"), "conversations", "ORDER BY name")
        },
    )


def load_image(sha256: str, cursor: Cursor) -> bytes | None:
    """Load the file of an image of any session; None if no session has it."""
    try:
        digest = bytes.fromhex(sha256)
    except ValueError:
        return None
    condition = "WHERE kind = 'image' AND sha256 = ? LIMIT 1"
    row = cursor.find(f"SELECT data FROM blobs JOIN session_blobs USING (sha256) {condition}", digest)
    return None if row is None else bytes(row[0])


def _delete(session_id: str, lock: str, cursor: Cursor) -> bool:
    of_session = "SELECT sha256 FROM session_blobs JOIN sessions USING (session) WHERE session_id = ?"
    digests = sorted(cursor.select(of_session, session_id))
    cursor.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))
    was_there = cursor.num_changed == 1
    unused = "NOT EXISTS (SELECT 1 FROM session_blobs WHERE session_blobs.sha256 = blobs.sha256)"
    for digest in digests:
        # Waits for transactions that add it to another session.
        cursor.execute(f"SELECT 1 FROM blobs WHERE sha256 = ? {lock}", digest)
        cursor.execute(f"DELETE FROM blobs WHERE sha256 = ? AND {unused}", digest)
    return was_there


def _find(cursor: Cursor, session_id: str, columns: str, rest: str = "") -> Any:
    """Get columns of a session; raises `UnknownSessionError` for an unknown one."""
    if is_storable(session_id):
        row = cursor.find(f"SELECT {columns} FROM sessions WHERE session_id = ? {rest}", session_id)
        if row is not None:
            return row
    raise UnknownSessionError(session_id)


def _insert(table: str, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


def _check_image(sha256: str, data: bytes) -> bytes:
    digest = hashlib.sha256(data).digest()
    if digest.hex() != sha256:
        raise InvariantError(f"an image must be named by its SHA-256, {digest.hex()}, got {sha256!r}")
    return digest


def is_storable(text: str) -> bool:
    """Whether text from outside can be the id of a session: databases refuse some characters with errors."""
    return text.isprintable()
