"""What the stores need of a database, and the little in which SQL differs between SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Cursor(Protocol):
    """A cursor inside a transaction. A value's place in a statement is `?`."""

    def execute(self, statement: str, values: Sequence[Any] = ()) -> None:
        """Run a statement."""

    def execute_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run a statement for each row; nothing happens without rows."""

    def fetch_one(self) -> Any:
        """The next row of the result, as a tuple; None at the end."""

    def fetch_all(self) -> list[Any]:
        """The rows of the result that are left, as tuples."""

    @property
    def num_changed(self) -> int:
        """Number of rows that the last statement changed."""


class Database(Protocol):
    """A database with the tables of `schema`, and this process as one owner of sessions.

    `write` and `read` raise `StoreError` for each error of the database.
    """

    owner: int
    """Names this process in the sessions that it owns."""
    share: str
    """Ends a SELECT whose rows must not change before the transaction ends."""

    def write(self, work: Callable[[Cursor], T]) -> T:
        """Call `work` in one transaction, which is on disk when this returns. It may be called twice."""

    def read(self, work: Callable[[Cursor], T]) -> T:
        """Call `work`, whose statements all see the data of one moment."""

    def is_alive(self, cursor: Cursor, owner: int) -> bool:
        """Whether the process of another `owner` still runs."""

    def close(self) -> None:
        """Disconnect. Nothing happens if it is closed."""
