"""A retried request is not sampled twice: requests with the same `Idempotency-Key` share one answer.

    first try    ── work ──────────────── answer, kept ──┐      the connection breaks here, or breaks earlier: the work
    second try            waits for it, or finds it ─────┴─►    goes on for `grace_s` until its retry comes

A client that no longer wants its answer says so by `POST /v1/abandon` with the key, which ends the work at once.

The key is the client's own and new for each request. Answers that ask for a retry (429 and 5xx) are not kept, streams
are not shared, and what is kept is bounded in bytes and time.
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
from unbroken.server.http.guard import Replay
from unbroken.server.http.json import json_response
from unbroken.server.metrics import Metrics

ABANDON_PATH = "/v1/abandon"
_HEADER = b"idempotency-key"
_MOST_KEPT_BYTES = 256 * 2**20
_KEPT_S = 600.0
_LONGEST_KEY = 200


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    digest: bytes
    work: asyncio.Task[list[Message]]
    num_waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """When an answer ended, and its bytes."""

    ended_s: float
    size: int


class Idempotency:
    """ASGI middleware, inside the guard: the guard's cancellation reaches the work only when nobody waits for it."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, grace_s: float = 2.0) -> None:
        self._app = app
        self._metrics = metrics
        self._grace_s = grace_s
        self._entries: dict[tuple[str, bytes], _Entry] = {}
        self._kept: OrderedDict[tuple[str, bytes], _Kept] = OrderedDict()
        """The entries that have ended, in that order: what may be forgotten."""
        self._kept_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        key = dict(scope["headers"]).get(_HEADER) if scope["type"] == "http" and scope["method"] == "POST" else None
        if key is None:
            await self._app(scope, receive, send)
            return
        if len(key) > _LONGEST_KEY:
            raise HttpError(400, f"Idempotency-Key may have at most {_LONGEST_KEY} characters, got {len(key)}")
        body = (await receive()).get("body", b"")
        if scope["path"] == ABANDON_PATH:
            await json_response({"abandoned": self._abandon(key)})(scope, receive, send)
            return
        if _asks_for_stream(body):
            await self._app(scope, Replay(body), send)
            return
        for message in await self._answer((scope["path"], key), scope, body):
            await send(message)

    def _abandon(self, name: bytes) -> bool:
        """End the work under a key; whether there was any."""
        works = [entry.work for (_, key), entry in self._entries.items() if key == name and not entry.work.done()]
        for work in works:
            work.cancel()
        return bool(works)

    async def _answer(self, key: tuple[str, bytes], scope: Scope, body: bytes) -> list[Message]:
        self._forget_old()
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
                asyncio.get_running_loop().call_later(self._grace_s, _cancel_if_nobody_waits, entry)

    async def _work(self, key: tuple[str, bytes], scope: Scope, body: bytes) -> list[Message]:
        messages: list[Message] = []

        async def collect(message: Message) -> None:
            messages.append(message)

        status = 500
        try:
            await self._app(scope, Replay(body), collect)
            status = messages[0]["status"]
        finally:
            if status == 429 or status >= 500:
                del self._entries[key]
            else:
                kept = _Kept(ended_s=time.monotonic(), size=sum(len(m.get("body", b"")) for m in messages))
                self._kept[key] = kept
                self._kept_bytes += kept.size
        return messages

    def _forget_old(self) -> None:
        """Drop ended answers that are too old, and the oldest while all are too large."""
        oldest_s = time.monotonic() - _KEPT_S
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            if kept.ended_s >= oldest_s and self._kept_bytes <= _MOST_KEPT_BYTES:
                return
            del self._kept[key], self._entries[key]
            self._kept_bytes -= kept.size


def _cancel_if_nobody_waits(entry: _Entry) -> None:
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
