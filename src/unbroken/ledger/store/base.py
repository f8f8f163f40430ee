"""The SessionStore protocol: sessions that survive the process that records them.

A method that writes returns once everything is on disk, and has written all of it or nothing; pieces of streams need
only outlive this process (`TurnCommit.waits_for_disk`). All methods block, and may be called from any thread. They
raise `StoreError` if the store cannot be read or written (a full disk, a server that does not come back). A server that
is lost during a commit may have committed: after a `StoreError` that is not one of the kinds below, load the session
again before committing more to it.

Several gateways may share one store, and each session is owned by one of them at a time: by the one that created it,
until that releases it or its process ends in any way; then by the first that acquires it. Only the owner commits turns.
Every gateway may read a session, finish it or delete it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from unbroken.ledger.records import SessionRecord, SessionStatus, StoredSession, TurnCommit


class SessionStore(Protocol):
    """Sessions, their messages, turns and images."""

    def create(self, record: SessionRecord) -> None:
        """Store a new session, which this store then owns.

        Raises:
            StoreError: its id or key is taken.
        """

    def load(self, session_id: str) -> StoredSession | None:
        """Load a session as of one moment; None if it is unknown."""

    def load_record(self, session_id: str) -> SessionRecord | None:
        """Load a session without its turns; None if it is unknown."""

    def load_image(self, sha256: str) -> bytes | None:
        """Load the file of an image of any session; None if no session has it."""

    def has_image(self, session_id: str, sha256: str) -> bool:
        """Whether a session refers to an image; false for an unknown session."""

    def find_by_key(self, key_digest: bytes) -> str | None:
        """Find the session that the SHA-256 of an API key belongs to."""

    def list_sessions(
        self, *, status: SessionStatus | None = None, after: str | None = None, limit: int | None = None
    ) -> list[SessionRecord]:
        """List sessions in the order in which they were created: those after session `after`, at most `limit`.

        Raises:
            UnknownSessionError: there is no session `after`.
        """

    def commit(self, commits: Sequence[TurnCommit]) -> None:
        """Store new turns of any sessions in one transaction; if one cannot be stored, none is.

        Raises:
            UnknownSessionError: a session was deleted.
            SessionEndedError: a session is finished or expired.
            NotOwnerError: a session is owned by another gateway, or has no owner.
            StoreError: a number of a node or turn is taken, or an image was never stored.
        """

    def finish(self, session_id: str, status: SessionStatus, outcome: Mapping[str, Any] | None = None) -> None:
        """End an open session. The same call once more changes nothing.

        Raises:
            UnknownSessionError: there is no such session.
            SessionEndedError: it has ended already, in another way.
        """

    def expire(self, now_s: float) -> list[str]:
        """End the open sessions whose time is over, and return their ids. They keep what they recorded."""

    def find_ended(self, session_ids: Sequence[str]) -> list[str]:
        """Find those of these sessions that have ended or were deleted, by any gateway, in the same order."""

    def delete(self, session_id: str) -> bool:
        """Remove a session, with the images that no other session has; returns whether there was one."""

    def acquire(self, session_id: str) -> bool:
        """Become or stay the owner of a session; False if another gateway that runs owns it.

        Raises:
            UnknownSessionError: there is no such session.
        """

    def find_owner_url(self, session_id: str) -> str | None:
        """The URL of the gateway that owns a session, if that is another one that runs and has one."""

    def release(self, session_id: str) -> None:
        """Give up a session. Nothing happens if this store does not own it or does not know it."""

    def close(self) -> None:
        """Release all sessions and disconnect. Nothing happens if it is closed."""
