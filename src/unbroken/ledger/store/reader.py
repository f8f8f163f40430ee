"""Read a store that a gateway may be writing to, without its lock, and without a change to it.

`StoreReader` answers from snapshots: each method sees the store as of one moment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from unbroken.errors import InvariantError
from unbroken.ledger.records import StoredSession
from unbroken.ledger.store.sql import Cursor, load_image, load_session

T = TypeVar("T")
_STATUS = "CAST(status AS TEXT)"


class StoreState(StrEnum):
    """Whether a gateway works on a store."""

    RUNNING = "running"
    ENDED = "ended"
    DIED = "died"
    """Its last gateway was killed; all turns that it acknowledged are there."""


class StoreSnapshots(Protocol):
    """A database that is only read. The methods raise `StoreError` if it cannot be."""

    def read(self, work: Callable[[Cursor], T]) -> T:
        """Call `work`, whose statements all see the data of one moment. It may be called again."""

    def find_state(self) -> StoreState:
        """Whether a gateway works on it."""

    def find_revision(self) -> str:
        """A text that is another one after a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSession:
    """A session in a list."""

    number: int
    """Of the session in its store, from 1 in the order of creation. A deleted session leaves a gap."""
    session_id: str
    status: str
    num_turns: int


class StoreReader:
    """Reads the sessions of a store. Several threads may use it; the methods raise `StoreError` as its snapshots do."""

    def __init__(self, snapshots: StoreSnapshots) -> None:
        self._snapshots = snapshots
        self.find_state = snapshots.find_state
        self.find_revision = snapshots.find_revision

    def list_numbers(self) -> list[tuple[int, str]]:
        """The number and the status of every session, in order."""
        statement = f"SELECT session, {_STATUS} FROM sessions ORDER BY session"
        rows = self._snapshots.read(lambda cursor: cursor.select(statement))
        return [(number, str(status)) for number, status in rows]

    def list_sessions(self, first: int, last: int) -> list[ListedSession]:
        """The sessions with numbers from `first` to `last`, in order."""
        num_turns = "(SELECT COUNT(*) FROM turns WHERE turns.session = sessions.session)"
        columns = f"session, CAST(session_id AS TEXT), {_STATUS}, {num_turns}"
        statement = f"SELECT {columns} FROM sessions WHERE session BETWEEN ? AND ? ORDER BY session"
        return [
            ListedSession(number=number, session_id=name, status=str(status), num_turns=count)
            for number, name, status, count in self._snapshots.read(
                lambda cursor: cursor.select(statement, first, last)
            )
        ]

    def load(self, session_id: str) -> StoredSession | None:
        """Load a session as of one moment; None if it is unknown."""
        return self._snapshots.read(functools.partial(load_session, session_id))

    def load_each(
        self, session_ids: Sequence[str], work: Callable[[StoredSession], T], *, broken: Callable[[str, Exception], T]
    ) -> dict[str, T]:
        """What `work` makes of each session, all as of one moment; those that are not there are left out.

        `broken` stands in for one that cannot be decoded, or fails in `work`.
        """

        def load(cursor: Cursor) -> dict[str, T]:
            made = {}
            for session_id in session_ids:
                try:
                    stored = self._load(session_id, cursor)
                    if stored is not None:
                        made[session_id] = work(stored)
                except (
                    InvariantError,
                    ArithmeticError,
                    AttributeError,
                    LookupError,
                    RecursionError,
                    TypeError,
                    ValueError,
                ) as error:
                    made[session_id] = broken(session_id, error)
            return made

        return self._snapshots.read(load)

    def _load(self, session_id: str, cursor: Cursor) -> StoredSession | None:
        return load_session(session_id, cursor)

    def load_image(self, sha256: str) -> bytes | None:
        """Load the file of an image of any session; None if no session has it."""
        return self._snapshots.read(functools.partial(load_image, sha256))

    def list_images(self) -> list[str]:
        """The SHA-256 of all images, as hex digits."""
        statement = "SELECT DISTINCT name FROM session_blobs WHERE kind = 'image' ORDER BY name"
        return [name for (name,) in self._snapshots.read(lambda cursor: cursor.select(statement))]
