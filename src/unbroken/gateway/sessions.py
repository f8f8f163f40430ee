"""All sessions of a gateway: created, found by key or id, loaded from the store, finished, expired.

A session that is at work lives in memory. It is made live by its first request, also after a restart or when the
gateway that owned it has died, and leaves memory when it ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from asyncio import wrap_future
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from unbroken.errors import SessionEndedError, StoreError, UnknownSessionError
from unbroken.gateway.config import GatewayConfig
from unbroken.gateway.session import Session, SessionSettings, StoredSettings, ended
from unbroken.gateway.state import SessionState
from unbroken.ledger.records import SessionRecord, SessionStatus, StoredSession, TurnRecord
from unbroken.ledger.store.base import SessionStore
from unbroken.ledger.store.sql import SessionWriter
from unbroken.messages import ToolSchema
from unbroken.rendering.base import ParsedResponse
from unbroken.server.context import ServerContext
from unbroken.server.http.errors import HttpError
from unbroken.types import EncodedImage, SampledSequence, TokenIds

_log = logging.getLogger(__name__)
KEY_PREFIX = "ub-session-"
"""How the keys of sessions begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _NewSession:
    """A new session and its key, which is shown only here."""

    record: SessionRecord
    api_key: str


class Sessions:
    """The sessions of one store, for one event loop."""

    def __init__(self, context: ServerContext, store: SessionStore, config: GatewayConfig) -> None:
        self._context = context
        self._store = store
        self._config = config
        self._live: dict[str, Session] = {}
        self._num_creating = 0
        """Sessions that are being stored, and then live."""
        self._keys: dict[bytes, str] = {}
        """Session ids by the digest of their key."""
        self._loading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held while a session is made live. A lock that nobody holds or waits for is gone: names may be made up."""
        self._writer: SessionWriter | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def create(self, settings: SessionSettings, *, ttl_s: float | None) -> _NewSession:
        """Create a session.

        Raises:
            HttpError: there are as many open sessions as the gateway takes.
            StoreError: it cannot be stored.
        """
        self._start()
        if len(self._live) + self._num_creating >= self._config.max_sessions:
            raise HttpError(
                429,
                f"the gateway takes {self._config.max_sessions} sessions at a time (max_sessions), and has "
                f"{len(self._live) + self._num_creating}: finish some",
                code="too_many_sessions",
                headers={"Retry-After": "10"},
            )
        if settings.on_disconnect is None:
            settings = settings.model_copy(update={"on_disconnect": self._config.on_disconnect})
        api_key = f"{KEY_PREFIX}{secrets.token_urlsafe(24)}"
        now_s = time.time()
        record = SessionRecord(
            session_id=secrets.token_hex(16),
            key_digest=_digest(api_key),
            created_s=now_s,
            expires_s=now_s + (self._config.ttl_s if ttl_s is None else ttl_s),
            settings=StoredSettings(
                **settings.model_dump(), model=self._context.config.model_name, tokenizer=self._context.config.tokenizer
            ).model_dump(mode="json"),
        )
        self._num_creating += 1
        try:
            await asyncio.to_thread(self._store.create, record)
            if self._config.is_worker:
                await asyncio.to_thread(self._store.release, record.session_id)
            else:
                self._add_live(record, SessionState())
        finally:
            self._num_creating -= 1
        return _NewSession(record=record, api_key=api_key)

    async def find_by_key(self, api_key: str) -> str | None:
        """Find the session of a key; None if it is no session's."""
        digest = _digest(api_key)
        if (session_id := self._keys.get(digest)) is None:
            session_id = await asyncio.to_thread(self._store.find_by_key, digest)
            if session_id is not None:
                self._keys[digest] = session_id
        return session_id

    async def find_elsewhere(self, session_id: str) -> str | None:
        """The URL of the gateway that has a session at work, if that is another one, and says where it is."""
        if (session := self._live.get(session_id)) is not None and not session.is_stale:
            return None
        return await asyncio.to_thread(self._store.find_owner_url, session_id)

    async def get_live(self, session_id: str) -> Session:
        """Get a session for a request of its agent, from the store if need be.

        Raises:
            HttpError: it does not exist, has ended, or is owned by another gateway.
        """
        self._start()
        async with self._loading.setdefault(session_id, asyncio.Lock()):
            if (session := self._live.get(session_id)) is not None:
                if not session.is_stale:
                    return session
                del self._live[session_id]
            stored = await self._load(session_id)
            if stored.record.status is not SessionStatus.OPEN:
                raise ended(stored.record)
            if not await asyncio.to_thread(self._store.acquire, session_id):
                raise HttpError(
                    503,
                    f"the session {session_id} is at work in another gateway",
                    code="session_elsewhere",
                    headers={"Retry-After": "1"},
                )
            stored = await self._load(session_id)  # as its last owner left it
            return self._add_live(stored.record, await self._restore(stored))

    async def view(self, session_id: str) -> tuple[SessionRecord, SessionState, int]:
        """A session to look at, live or stored, and the number of its requests in flight.

        Raises:
            HttpError: it does not exist.
        """
        if (session := self._live.get(session_id)) is not None:
            return session.record, session.state, session.num_in_flight
        stored = await self._load(session_id)
        return stored.record, await self._restore(stored), 0

    def get_engine_s(self, session_id: str) -> float:
        """Seconds in which a turn of the session was queued or sampled; 0 unless it is live in this process."""
        return 0.0 if (session := self._live.get(session_id)) is None else session.engine_s

    async def load_image(self, session_id: str, sha256: str) -> bytes:
        """Load the file of an image of a session; `HttpError` if there is no such session, or it has no such image."""
        if (session := self._live.get(session_id)) is not None:
            is_known = sha256 in session.state.images
        else:
            is_known = await asyncio.to_thread(self._store.has_image, session_id, sha256)
        data = await asyncio.to_thread(self._store.load_image, sha256) if is_known else None
        if data is None:
            if session is None and await asyncio.to_thread(self._store.load_record, session_id) is None:
                raise _unknown(session_id)
            raise HttpError(404, f"the session has no image {sha256[:64]!r}", code="image_not_found")
        return data

    async def list_records(self, *, status: SessionStatus | None, after: str | None, limit: int) -> list[SessionRecord]:
        """List sessions, oldest first; `HttpError` if there is no session `after`."""
        try:
            return await asyncio.to_thread(self._store.list_sessions, status=status, after=after, limit=limit)
        except UnknownSessionError:
            raise _unknown(str(after)) from None

    async def finish(self, session_id: str, outcome: Mapping[str, Any]) -> SessionRecord:
        """Finish a session, once its turns in flight are recorded. From now on it takes no request.

        Raises:
            HttpError: it does not exist, or has ended in another way.
        """
        session = self._live.get(session_id)
        if session is not None:
            session.record = replace(session.record, status=SessionStatus.FINISHED, outcome=dict(outcome))
            await session.finish_pending()
        try:
            await asyncio.to_thread(self._store.finish, session_id, SessionStatus.FINISHED, dict(outcome))
        except UnknownSessionError:
            raise _unknown(session_id) from None
        except SessionEndedError as error:
            raise HttpError(409, str(error), code="session_ended") from None
        await self._drop(session_id)
        return (await self._load(session_id)).record

    async def delete(self, session_id: str) -> None:
        """Delete a session and what it recorded, and abort its turns in flight. `HttpError` for an unknown session."""
        if (session := self._live.get(session_id)) is not None:
            session.cancel_pending()
        await self._drop(session_id)
        if not await asyncio.to_thread(self._store.delete, session_id):
            raise _unknown(session_id)
        self._keys = {digest: owner for digest, owner in self._keys.items() if owner != session_id}

    async def close(self) -> None:
        """Wait for what is in flight, up to `drain_s`, and record it; release the sessions and close the store."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper
        sessions = list(self._live.values())
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_s):
                await asyncio.gather(*(session.finish_pending() for session in sessions))
        for session in sessions:
            session.cancel_pending()
            await session.finish_pending()
        if self._writer is not None:
            await self._writer.close()
        await asyncio.to_thread(self._store.close)

    def _start(self) -> None:
        if self._writer is None:
            self._writer = SessionWriter(self._store)
            self._sweeper = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        """End sessions whose time is over, and drop those that any gateway has ended, again and again."""
        while True:
            try:
                await asyncio.to_thread(self._store.expire, time.time())
                for session_id in await asyncio.to_thread(self._store.find_ended, list(self._live)):
                    record = await asyncio.to_thread(self._store.load_record, session_id)
                    if record is not None and (session := self._live.get(session_id)) is not None:
                        session.record = record
                    await self._drop(session_id)
            except StoreError:
                _log.exception("sessions could not be expired; trying again in %g s", self._config.sweep_s)
            await asyncio.sleep(self._config.sweep_s)

    async def _drop(self, session_id: str) -> None:
        if self._live.pop(session_id, None) is not None:
            await asyncio.to_thread(self._store.release, session_id)

    def _add_live(self, record: SessionRecord, state: SessionState) -> Session:
        assert self._writer is not None
        session = Session(record, state, writer=self._writer, max_in_flight=self._config.max_in_flight)
        self._live[record.session_id] = session
        self._keys[record.key_digest] = record.session_id
        return session

    async def _load(self, session_id: str) -> StoredSession:
        stored = await asyncio.to_thread(self._store.load, session_id)
        if stored is None:
            raise _unknown(session_id)
        return stored

    async def _restore(self, stored: StoredSession) -> SessionState:
        return await wrap_future(
            self._context.text_threads.submit(
                SessionState.restore, stored, load_image=self._load_image, parse=self._parse
            )
        )

    def _load_image(self, sha256: str) -> EncodedImage:
        data = self._store.load_image(sha256)
        if data is None:
            raise StoreError(f"the store must have the image {sha256}, which a session refers to")
        return EncodedImage(data)

    def _parse(
        self, turn: TurnRecord, sequence: SampledSequence, prompt_ids: TokenIds, tools: Sequence[ToolSchema]
    ) -> ParsedResponse:
        renderer = self._context.get_renderer(turn.options["template"], turn.options["images"])
        return renderer.parse_response(sequence.completion_ids, prompt_ids=prompt_ids, tools=tools)


def _digest(api_key: str) -> bytes:
    return hashlib.sha256(api_key.encode(errors="surrogateescape")).digest()


def _unknown(session_id: str) -> HttpError:
    return HttpError(404, f"there is no session {session_id[:64]!r}", code="session_not_found")
