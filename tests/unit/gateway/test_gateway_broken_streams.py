"""Streams that break: what an agent has acted on is on disk, and what it kept of a stream is known as ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from support.dialects import MESSAGES, RESPONSES
from support.gateways import CALL, CHAT, TOOLS, USER, replies, running_gateway
from unbroken.engines.scripted import ScriptedEngine
from unbroken.ledger.records import TurnCommit
from unbroken.ledger.store import open_store
from unbroken.ledger.store.base import SessionStore
from unbroken.types import SampleChunk, SampleRequest

ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "tools": TOOLS, "stream": True},
    RESPONSES: {
        "input": USER["content"],
        "tools": [{"type": "function", **TOOLS[0]["function"]}],
        "stream": True,
    },
    MESSAGES: {
        "model": "any",
        "max_tokens": 400,
        "messages": [USER],
        "tools": [{"name": "look", "input_schema": TOOLS[0]["function"]["parameters"]}],
        "stream": True,
    },
}


class SlowEngine(ScriptedEngine):
    """Samples so slowly that each id is read before the next one."""

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        async for chunk in super().stream(request):
            yield chunk
            await asyncio.sleep(0.005)


class WatchedStore:
    """A store that tells of each commit."""

    def __init__(self, store: SessionStore, tell: Callable[[str], None]) -> None:
        self._store = store
        self._tell = tell

    def commit(self, commits: Sequence[TurnCommit]) -> None:
        self._store.commit(commits)
        self._tell("commit")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


async def post(app: Any, path: str, body: dict[str, Any], key: str, tell: Callable[[str], None]) -> None:
    """One request, whose parts of the answer are told as they are sent."""
    parts = [{"type": "http.request", "body": orjson.dumps(body), "more_body": False}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        return await asyncio.Future()

    async def send(message: Any) -> None:
        tell(message.get("body", b"").decode())

    headers = [
        (b"authorization", f"Bearer {key}".encode()),
        (b"content-type", b"application/json"),
        (b"host", b"localhost"),
    ]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "headers": headers, "scheme": "http",
        "server": ("localhost", 80), "client": ("localhost", 1), "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)


@pytest.mark.parametrize("path", ASKED)
async def test_a_call_leaves_when_its_turn_is_on_disk_and_the_text_before_it_at_once(tmp_path: Path, path: str) -> None:
    told: list[str] = []
    store = WatchedStore(open_store(str(tmp_path)), told.append)
    two = CALL.removesuffix("<|im_end|>") + "\n" + CALL
    engine = SlowEngine(replies("Q. " + two), vocab_size=5000, context_length=4096, allow_forks=True)
    async with running_gateway(engine, store) as gateway:
        created = await gateway.create()
        await post(gateway.app, path, ASKED[path], created["api_key"], told.append)
    commit = told.index("commit")
    assert any("Q" in part for part in told[:commit]), told
    arguments = r"{\"cell\": 4}"
    assert not any(arguments in part for part in told[:commit])
    assert "".join(told[commit:]).count(arguments) >= 2
