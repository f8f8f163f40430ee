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
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unbroken.server.http.errors import HttpError
from unbroken.server.http.json import json_response
from unbroken.server.metrics import Metrics

ABANDON_PATH = "/v1/abandon"
KNOWS_RETRIES = "unbroken.knows_retries"
"""Where the scope says that the application keeps its answers, and answers retries itself."""
_HEADER = b"idempotency-key"
_MAX_KEPT_BYTES = 256 * 2**20
_KEPT_S = 600.0
_MAX_KEY_LENGTH = 200
_ENTRY_BYTES = 2048
"""What a kept answer takes beside its bodies: key, digest, headers, and the objects that hold them."""
_ABANDON_ROUTE = Route(ABANDON_PATH, endpoint=json_response)
"""Only its path is used, by the metrics: it is answered here."""


_Key: TypeAlias = tuple[str, bytes]
"""Path and `Idempotency-Key`."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    """A request at work."""

    digest: bytes
    work: asyncio.Task[list[Message]]
    num_waiting: int = 0
    scope: Scope
    """Of the first try: the application adds the route that answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """An answer, and nothing else of its request: a scope holds 7 kB with its exit stacks, for ten minutes."""

    digest: bytes
    messages: list[Message]
    route: Any
    """Of the application, for the metrics; None if none answered."""
    ended_s: float
    size: int


class ReplayBody:
    """A `receive` that returns the body once, then blocks."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def __call__(self) -> MutableMapping[str, Any]:
        """Handle one request, as ASGI has it."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Future()  # the guard waits for the disconnection
        raise AssertionError


class Idempotency:
    """An ASGI application inside the guard, for the requests that it `takes`.

    The guard's cancellation ends the work only if no other request waits for it.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, grace_s: float = 2.0) -> None:
        self._app = app
        self._metrics = metrics
        self._grace_s = grace_s
        self._entries: dict[_Key, _Entry] = {}
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        """Oldest first."""
        self._kept_bytes = 0

    @staticmethod
    def takes(scope: Scope) -> bool:
        """Whether the answer of a request is kept under its key: not where the application keeps its answers itself."""
        return scope["method"] == "POST" and not scope.get(KNOWS_RETRIES) and _HEADER in dict(scope["headers"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, as ASGI has it."""
        key = dict(scope["headers"])[_HEADER]
        if len(key) > _MAX_KEY_LENGTH:
            raise HttpError(400, f"Idempotency-Key must have at most {_MAX_KEY_LENGTH} characters, got {len(key)}")
        body = (await receive()).get("body", b"")
        if scope["path"] == ABANDON_PATH:
            scope["route"] = _ABANDON_ROUTE
            await json_response({"abandoned": self._abandon(key)})(scope, receive, send)
            return
        if _asks_for_stream(body):
            await self._app(scope, ReplayBody(body), send)
            return
        for message in await self._answer((scope["path"], key), scope, body):
            await send(message)

    def _abandon(self, abandoned: bytes) -> bool:
        """End the work under a key, if there is any."""
        keys = [key for key, entry in self._entries.items() if key[1] == abandoned and not entry.work.done()]
        for key in keys:
            self._entries.pop(key).work.cancel()
        return bool(keys)

    async def _answer(self, key: _Key, scope: Scope, body: bytes) -> list[Message]:
        self._drop_old()
        digest = hashlib.sha256(body).digest()
        kept, entry = self._kept.get(key), self._entries.get(key)
        self._check_repeated(kept or entry, digest)
        if kept is not None:
            if kept.route is not None:
                scope["route"] = kept.route
            return kept.messages
        if entry is None:
            work = asyncio.create_task(self._work(scope, body))
            entry = begun = self._entries[key] = _Entry(digest=digest, work=work, scope=scope)
            work.add_done_callback(lambda _: self._keep_or_drop(key, begun))
        entry.num_waiting += 1
        try:
            return await asyncio.shield(entry.work)
        except asyncio.CancelledError:
            if entry.work.cancelled() and not _is_cancelled():
                raise HttpError(503, "another try of this request was abandoned", code="aborted") from None
            raise
        finally:
            if "route" in entry.scope:  # for the metrics
                scope["route"] = entry.scope["route"]
            entry.num_waiting -= 1
            if entry.num_waiting == 0 and not entry.work.done():
                asyncio.get_running_loop().call_later(self._grace_s, self._cancel_unless_awaited, key, entry)

    def _check_repeated(self, known: _Kept | _Entry | None, digest: bytes) -> None:
        """Count a request that was there before; raise if its key came with another body."""
        if known is None:
            return
        if known.digest != digest:
            raise refuse_reused_key()
        self._metrics.repeated.inc()

    async def _work(self, scope: Scope, body: bytes) -> list[Message]:
        messages: list[Message] = []

        async def collect(message: Message) -> None:
            messages.append(message)

        await self._app(scope, ReplayBody(body), collect)
        return messages

    def _keep_or_drop(self, key: _Key, entry: _Entry) -> None:
        """Keep an answer. Drop one that asks for a retry, and work that failed or was cancelled (even unbegun)."""
        if self._entries.get(key) is not entry:
            return  # it was abandoned
        del self._entries[key]
        work = entry.work
        messages = [] if work.cancelled() or work.exception() is not None else work.result()
        status = messages[0]["status"] if messages else 500
        if status == 429 or status >= 500:
            return
        kept = _Kept(
            digest=entry.digest,
            messages=messages,
            route=entry.scope.get("route"),
            ended_s=time.monotonic(),
            size=_ENTRY_BYTES + sum(len(m.get("body", b"")) for m in messages),
        )
        self._kept[key] = kept
        self._kept_bytes += kept.size

    def _cancel_unless_awaited(self, key: _Key, entry: _Entry) -> None:
        if entry.num_waiting == 0 and self._entries.get(key) is entry and not entry.work.done():
            del self._entries[key]
            entry.work.cancel()

    def _drop_old(self) -> None:
        """Drop answers that are too old, and the oldest while all together are too large."""
        oldest_s = time.monotonic() - _KEPT_S
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            if kept.ended_s >= oldest_s and self._kept_bytes <= _MAX_KEPT_BYTES:
                return
            del self._kept[key]
            self._kept_bytes -= kept.size


def refuse_reused_key() -> HttpError:
    """The error for a key that came with another body before."""
    return HttpError(
        400,
        "Idempotency-Key was used for a request with another body: use a new key for each request",
        code="idempotency_key_reused",
    )


def _is_cancelled() -> bool:
    """Whether this task itself is cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _asks_for_stream(body: bytes) -> bool:
    if b'"stream"' not in body:
        return False
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(value, dict) and bool(value.get("stream"))
