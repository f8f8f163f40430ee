"""Streams that break: what an agent has acted on is on disk, and what it kept of a stream is known as ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from support.dialects import MESSAGES, RESPONSES
from support.gateways import CALL, CHAT, TOOLS, USER, replies, result, running_gateway
from support.servers import encode, listening
from support.waits import wait_until
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import EngineError
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
        if any(commit.turns for commit in commits):
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


class BreakingEngine(SlowEngine):
    """Fails in the middle of its first reply."""

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        is_first = not self.requests
        async with aclosing(super().stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk
                if is_first and self.num_sampled == 30:
                    raise EngineError("the engine broke")


async def read_until(url: str, key: str, body: dict[str, Any], number: int | None) -> dict[str, Any]:
    """Read the deltas of a stream up to so many characters of its text, and go; all, if None."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    async with (
        httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}) as client,
        client.stream("POST", CHAT, json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            event = orjson.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            for delta in (choice["delta"] for choice in event.get("choices", ())):
                for name in ("content", "reasoning_content"):
                    message[name] += delta.get(name) or ""
                if calls := delta.get("tool_calls"):
                    message["tool_calls"] = [{name: call[name] for name in call if name != "index"} for call in calls]
            if number is not None and len(message["content"]) >= number:
                break
    return message


THINKING = "<think>\nThe cell is behind the tool.\n</think>\n\n"
TEXTS = (f"{THINKING}I look into the cell now.\n{CALL}", f"{THINKING}I try again.\n{CALL}", "It is 17.<|im_end|>")


@pytest.mark.parametrize("breaks", ["the engine", "the reader, turn finished", "the reader, turn aborted"])
@pytest.mark.parametrize("asks", ["with what it had", "as before"])
async def test_what_an_agent_had_of_a_broken_stream_is_ours(tmp_path: Path, breaks: str, asks: str) -> None:
    """Codex asks again with what it had; qwen-code asks the same again, and joins both texts."""
    is_engine = breaks == "the engine"
    make = BreakingEngine if is_engine else SlowEngine
    engine = make(replies(*TEXTS), vocab_size=5000, context_length=4096, allow_forks=True)
    async with running_gateway(engine, tmp_path) as gateway, listening(gateway.app) as url:
        created = await gateway.create(on_disconnect="abort" if breaks.endswith("aborted") else "finish")
        body: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "stream": True}
        begun = await read_until(url, created["api_key"], body, None if is_engine else 4)
        assert "I l" in begun["content"]
        assert "tool_calls" not in begun
        session = await gateway.app.state.sessions.get_live(created["session_id"])
        await wait_until(lambda: session.state.broken)
        if asks == "with what it had":
            body["messages"] = [USER, begun]
        else:  # its retry may come later than the end of the first turn
            await wait_until(lambda: session.num_in_flight == 0)
            body["messages"] = [USER]
        retried = await read_until(url, created["api_key"], {**body, "user": "again"}, None)
        assert retried["content"].startswith("I try again.")
        joined = {name: begun[name] + retried[name] for name in ("content", "reasoning_content")}
        history = [USER, {**retried, **joined}, result(retried)]
        answer = await read_until(url, created["api_key"], {**body, "messages": history}, None)
        assert answer["content"] == "It is 17."
        await wait_until(lambda: session.num_in_flight == 0)
        found = await gateway.look(created)
        rows = (await gateway.look(created, "/samples?advantage=1"))["samples"]
    assert found["forks"] == []
    assert found["counters"]["bridges/derived"] == 1
    assert found["counters"]["tolerances/dropped_text"] == (2 if asks == "with what it had" else 1)
    trained = [[one for one, used in zip(row["token_ids"], row["loss_mask"], strict=True) if used] for row in rows]
    assert encode(TEXTS[1]) + encode(TEXTS[2]) in trained
    assert len(rows) == (2 if breaks.endswith("finished") else 1)


@pytest.mark.parametrize("asks", ["with what it had", "as before"])
async def test_what_was_streamed_before_a_gateway_was_killed_is_ours(location: str, asks: str) -> None:
    """The second gateway has nothing but the store, as the killed one left it."""
    engine = SlowEngine(replies(*TEXTS), vocab_size=5000, context_length=4096, allow_forks=True)
    body: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "stream": True}
    async with running_gateway(engine, location) as gateway, listening(gateway.app) as url:
        created = await gateway.create(on_disconnect="abort")
        begun = await read_until(url, created["api_key"], body, 4)
        session = await gateway.app.state.sessions.get_live(created["session_id"])
        await wait_until(lambda: session.num_in_flight == 0)
    async with running_gateway(engine, location) as gateway, listening(gateway.app) as url:
        assert (await gateway.look(created))["num_turns"] == 0
        asked = [USER, begun] if asks == "with what it had" else [USER]
        retried = await read_until(url, created["api_key"], {**body, "messages": asked}, None)
        assert retried["content"].startswith("I try again.")
    async with running_gateway(engine, location) as gateway, listening(gateway.app) as url:
        joined = {name: begun[name] + retried[name] for name in ("content", "reasoning_content")}
        history = [USER, {**retried, **joined}, result(retried)]
        answer = await read_until(url, created["api_key"], {**body, "messages": history}, None)
        assert answer["content"] == "It is 17."
        found = await gateway.look(created)
        (row,) = (await gateway.look(created, "/samples?advantage=1"))["samples"]
    assert (found["num_turns"], found["forks"]) == (2, [])
    assert found["counters"]["tolerances/dropped_text"] == (2 if asks == "with what it had" else 1)
    trained = [one for one, used in zip(row["token_ids"], row["loss_mask"], strict=True) if used]
    assert trained == encode(TEXTS[1]) + encode(TEXTS[2])


async def test_text_of_a_stream_is_kept_before_it_is_sent_and_dropped_once_its_turn_is_recorded(tmp_path: Path) -> None:
    told: list[str] = []

    class Store(WatchedStore):
        def commit(self, commits: Sequence[TurnCommit]) -> None:
            super().commit(commits)
            kept.extend(piece.message["content"] for commit in commits for piece in commit.streamed)

    kept: list[str] = []
    sent: list[tuple[str, str]] = []
    store = Store(open_store(str(tmp_path)), told.append)
    engine = SlowEngine(replies("It is 17, I think.<|im_end|>"), vocab_size=5000, context_length=4096)

    def tell(part: str) -> None:
        for line in part.splitlines():
            event = orjson.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            choices = event.get("choices", ())
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
            if text and choices[0].get("finish_reason") is None:
                sent.append((text, "".join(kept)))

    async with running_gateway(engine, store) as gateway:
        created = await gateway.create()
        await post(gateway.app, CHAT, ASKED[CHAT], created["api_key"], tell)
        stored = gateway.app.state.sessions._store.load(created["session_id"])
    texts = [text for text, _ in sent]
    assert len(texts) > 3
    for number, (_, before) in enumerate(sent, start=1):
        assert before.startswith("".join(texts[:number]))
    assert (len(stored.turns), stored.streamed) == (1, ())


async def test_only_the_last_broken_streams_of_a_session_are_kept(tmp_path: Path) -> None:
    engine = SlowEngine(replies(*TEXTS), vocab_size=5000, context_length=4096, allow_forks=True)
    body: dict[str, Any] = {"tools": TOOLS, "stream": True}
    store = open_store(str(tmp_path))
    async with running_gateway(engine, store) as gateway, listening(gateway.app) as url:
        created = await gateway.create(on_disconnect="abort")
        session = await gateway.app.state.sessions.get_live(created["session_id"])
        for number in range(8):
            question = {"role": "user", "content": f"{number}"}
            await read_until(url, created["api_key"], {**body, "messages": [question]}, 1)
            await wait_until(lambda: session.num_in_flight == 0)
        stored = store.load(created["session_id"])
    assert stored is not None
    assert 4 <= len({piece.answer_id for piece in stored.streamed}) <= 5
