"""Retries without sampling again: requests with the same `Idempotency-Key` share one answer.

    first try    ── work ──────────────── answer, kept ──┐      if the connection breaks before the answer, the work
    second try            waits for it, or finds it ─────┴─►    continues for `grace_s`, in case the retry comes

`POST /v1/abandon` with the key ends the work at once. The client makes a new key for each request. Answers that ask for
a retry (429 and 5xx) are not kept, streams are not shared, and kept answers are bounded in bytes and time.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unbroken.server.http.errors import HttpError
from unbroken.server.http.guard import ReplayBody
from unbroken.server.http.json import json_response
from unbroken.server.metrics import Metrics

ABANDON_PATH = "/v1/abandon"
_HEADER = b"idempotency-key"
_MAX_KEPT_BYTES = 256 * 2**20
_KEPT_S = 600.0
_MAX_KEY_LENGTH = 200


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    digest: bytes
    work: asyncio.Task[list[Message]]
    num_waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """When an answer ended, and its size in bytes."""

    ended_s: float
    size: int


class Idempotency:
    """ASGI middleware inside the guard, whose cancellation ends the work only if no other request waits for it."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, grace_s: float = 2.0) -> None:
        self._app = app
        self._metrics = metrics
        self._grace_s = grace_s
        self._entries: dict[tuple[str, bytes], _Entry] = {}
        self._kept: OrderedDict[tuple[str, bytes], _Kept] = OrderedDict()
        """The finished entries, oldest first."""
        self._kept_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        key = dict(scope["headers"]).get(_HEADER) if scope["type"] == "http" and scope["method"] == "POST" else None
        if key is None:
            await self._app(scope, receive, send)
            return
        if len(key) > _MAX_KEY_LENGTH:
            raise HttpError(400, f"Idempotency-Key must have at most {_MAX_KEY_LENGTH} characters, got {len(key)}")
        body = (await receive()).get("body", b"")
        if scope["path"] == ABANDON_PATH:
            await json_response({"abandoned": self._abandon(key)})(scope, receive, send)
            return
        if _asks_for_stream(body):
            await self._app(scope, ReplayBody(body), send)
            return
        for message in await self._answer((scope["path"], key), scope, body):
            await send(message)

    def _abandon(self, abandoned: bytes) -> bool:
        """End the work under a key, if there is any."""
        works = [entry.work for (_, key), entry in self._entries.items() if key == abandoned and not entry.work.done()]
        for work in works:
            work.cancel()
        return bool(works)

    async def _answer(self, key: tuple[str, bytes], scope: Scope, body: bytes) -> list[Message]:
        self._drop_old()
        digest = hashlib.sha256(body).digest()
        entry = self._entries.get(key)
        if entry is None:
            entry = _Entry(digest=digest, work=asyncio.create_task(self._work(key, scope, body)))
            self._entries[key] = entry
        elif entry.digest != digest:
            raise HttpError(
                400, "Idempotency-Key was used for a request with another body: use a new key for each request"
            )
        else:
            self._metrics.repeated.inc()
        entry.num_waiting += 1
        try:
            return await asyncio.shield(entry.work)
        finally:
            entry.num_waiting -= 1
            if entry.num_waiting == 0 and not entry.work.done():
                asyncio.get_running_loop().call_later(self._grace_s, _cancel_unless_awaited, entry)

    async def _work(self, key: tuple[str, bytes], scope: Scope, body: bytes) -> list[Message]:
        messages: list[Message] = []

        async def collect(message: Message) -> None:
            messages.append(message)

        status = 500
        try:
            await self._app(scope, ReplayBody(body), collect)
            status = messages[0]["status"]
        finally:
            if status == 429 or status >= 500:
                del self._entries[key]
            else:
                kept = _Kept(ended_s=time.monotonic(), size=sum(len(m.get("body", b"")) for m in messages))
                self._kept[key] = kept
                self._kept_bytes += kept.size
        return messages

    def _drop_old(self) -> None:
        """Drop answers that are too old, and the oldest while all together are too large."""
        oldest_s = time.monotonic() - _KEPT_S
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            if kept.ended_s >= oldest_s and self._kept_bytes <= _MAX_KEPT_BYTES:
                return
            del self._kept[key], self._entries[key]
            self._kept_bytes -= kept.size


def _cancel_unless_awaited(entry: _Entry) -> None:
    if entry.num_waiting == 0:
        entry.work.cancel()


def _asks_for_stream(body: bytes) -> bool:
    if b'"stream"' not in body:
        return False
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(value, dict) and bool(value.get("stream"))
