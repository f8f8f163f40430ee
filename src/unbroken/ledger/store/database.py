"""What the stores need of a database, and the little in which SQL differs between SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

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

    def fetch_one(self) -> Any:
        """The next row of the result, as a tuple; None at the end."""
        return self._cursor.fetchone()

    def fetch_all(self) -> list[Any]:
        """The rows of the result that are left, as tuples."""
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

    def write(self, work: Callable[[Cursor], T]) -> T:
        """Call `work` in one transaction, which is on disk when this returns. It may be called twice."""

    def read(self, work: Callable[[Cursor], T]) -> T:
        """Call `work`, whose statements all see the data of one moment."""

    def is_alive(self, cursor: Cursor, owner: int) -> bool:
        """Whether the process of another `owner` still runs."""

    def close(self) -> None:
        """Disconnect. Nothing happens if it is closed."""
