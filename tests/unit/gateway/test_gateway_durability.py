"""Killed at any moment and started again: no committed turn is lost or doubled, and the agent's retry gets its answer.

What a killed process leaves behind is what its files hold at that moment. So the store's folder is copied at each
moment that matters, while one agent makes one conversation, and a gateway is started on each copy.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from support.gateways import CALL, CHAT, TOOLS, USER, Gateway, restarted, running_gateway
from support.servers import encode
from unbroken.engines.scripted import ScriptedEngine
from unbroken.ledger.records import TurnCommit
from unbroken.ledger.store import open_store
from unbroken.ledger.store.base import SessionStore
from unbroken.types import SampleChunk, SampleRequest, SampleResult

NUM_TURNS = 4
REPLY = encode("I look.\n" + CALL)


@dataclass
class Moments:
    """Copies of the store's folder, and how many answers the agent had by then."""

    folder: Path
    copies: Path
    num_answers: int = 0
    taken: list[tuple[Path, int, str]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while the folder is copied or changed: streamed text is written while the engine samples."""

    def take(self, name: str) -> None:
        with self.lock:
            copy = self.copies / str(len(self.taken))
            shutil.copytree(self.folder, copy)
            self.taken.append((copy, self.num_answers, name))


class WatchedEngine(ScriptedEngine):
    """Tells when it is asked, and after each of the ids that it streams."""

    tell: Callable[[str], None] = staticmethod(lambda name: None)

    async def sample(self, request: SampleRequest) -> SampleResult:
        self.tell("asked")
        result = await super().sample(request)
        self.tell("sampled")
        return result

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        self.tell("asked")
        async for chunk in super().stream(request):
            self.tell("an id sampled")
            yield chunk


class WatchedStore:
    """A store of which moments are taken before and after each commit."""

    def __init__(self, store: SessionStore, moments: Moments) -> None:
        self._store = store
        self._moments = moments

    def commit(self, commits: Sequence[TurnCommit]) -> None:
        with self._moments.lock:
            self._moments.take("before the commit")
            self._store.commit(commits)
            self._moments.take("after the commit, before the answer")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def engine() -> WatchedEngine:
    return WatchedEngine(lambda _: REPLY, allow_forks=True)


async def ask(gateway: Gateway, key: str, messages: list[Any], stream: bool, *, retry: int = 0) -> dict[str, Any]:
    """One request of an SDK that counts its retries; returns the reply."""
    agent = gateway.agent({"api_key": key})
    body = {"messages": messages, "tools": TOOLS, "stream": stream}
    answer = await agent.post(CHAT, json=body, headers={"x-stainless-retry-count": str(retry)})
    assert answer.status_code == 200, answer.text
    if not stream:
        reply: dict[str, Any] = answer.json()["choices"][0]["message"]
        return reply
    deltas = read_deltas(answer.text)
    calls = [{k: v for k, v in call.items() if k != "index"} for one in deltas for call in one.get("tool_calls", ())]
    return {"role": "assistant", "content": "".join(one.get("content") or "" for one in deltas), "tool_calls": calls}


def read_deltas(text: str) -> list[dict[str, Any]]:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [choice["delta"] for event in events for choice in orjson.loads(event)["choices"]]


def answer_call(reply: dict[str, Any], number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": f"result {number}"}


async def record_moments(tmp_path: Path, *, stream: bool) -> tuple[Moments, str, Any]:
    """One conversation; returns the moments, the key, and the requests in order."""
    moments = Moments(tmp_path / "store", tmp_path / "copies")
    requests: list[list[Any]] = []
    watched = engine()
    store = WatchedStore(open_store(str(moments.folder)), moments)
    async with running_gateway(watched, store) as gateway:
        created = await gateway.create()
        watched.tell = moments.take  # type: ignore[method-assign]
        messages: list[Any] = [USER]
        for number in range(NUM_TURNS):
            requests.append(list(messages))
            reply = await ask(gateway, created["api_key"], messages, stream)
            moments.num_answers += 1
            moments.take("answered")
            messages += [reply, answer_call(reply, number)]
    return moments, created["api_key"], requests


@pytest.mark.parametrize("stream", [False, True])
async def test_a_killed_gateway_goes_on(tmp_path: Path, stream: bool) -> None:
    moments, key, requests = await record_moments(tmp_path, stream=stream)
    async with running_gateway(engine(), tmp_path / "none") as running:
        for copy, num_answers, name in moments.taken:
            await check_restart(running, copy, num_answers, name, key, requests, stream=stream)


async def check_restart(
    running: Gateway, copy: Path, num_answers: int, name: str, key: str, requests: Any, *, stream: bool
) -> None:
    async with restarted(running, open_store(str(copy))) as gateway:
        (session,) = (await gateway.client.get("/v1/sessions")).json()["sessions"]
        before = await gateway.look(session)
        assert num_answers <= before["num_turns"] <= num_answers + 1, f"lost or invented: {name}"
        if num_answers == NUM_TURNS:
            return
        reply = await ask(gateway, key, requests[num_answers], stream, retry=1)
        after = await gateway.look(session)
        assert after["num_turns"] == num_answers + 1, f"doubled: {name}"
        await ask(gateway, key, [*requests[num_answers], reply, answer_call(reply, num_answers)], stream)
        (row,) = (await gateway.look(session, "/samples?advantage=1"))["samples"]
        trained = [i for i, used in zip(row["token_ids"], row["loss_mask"], strict=True) if used]
        assert trained == REPLY * (num_answers + 2), f"not one exact row: {name}"
        assert (await gateway.look(session))["forks"] == []


async def test_there_are_a_hundred_moments(tmp_path: Path) -> None:
    streamed, _, _ = await record_moments(tmp_path / "a", stream=True)
    whole, _, _ = await record_moments(tmp_path / "b", stream=False)
    names = {name for _, _, name in (*streamed.taken, *whole.taken)}
    assert len(streamed.taken) + len(whole.taken) >= 100
    assert names >= {"before the commit", "after the commit, before the answer", "an id sampled", "answered"}


class LastChoiceFirst(ScriptedEngine):
    """Streams the choices of a request one after the other, the last one first."""

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        chunks = [chunk async for chunk in super().stream(request)]
        for chunk in sorted(chunks, key=lambda chunk: -chunk.index):
            yield chunk


async def test_a_retry_gets_the_same_choices_in_whatever_order_they_ended(tmp_path: Path) -> None:
    texts = iter(["first", "second", "never asked for"])
    engine = LastChoiceFirst(lambda _: encode(f"{next(texts)}<|im_end|>"), allow_forks=True)

    async def ask_for_two(agent: Any, retry: int) -> list[str]:
        body = {"messages": [USER], "n": 2, "stream": True}
        answer = await agent.post(CHAT, json=body, headers={"x-stainless-retry-count": str(retry)})
        contents = ["", ""]
        for line in answer.text.splitlines():
            for choice in orjson.loads(line.removeprefix("data: "))["choices"] if line.startswith("data: {") else ():
                contents[choice["index"]] += choice["delta"].get("content") or ""
        return contents

    async with running_gateway(engine, tmp_path / "store") as gateway:
        created = await gateway.create()
        agent = gateway.agent(created)
        assert await ask_for_two(agent, 0) == ["first", "second"]
        assert await ask_for_two(agent, 1) == ["first", "second"]
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        async with restarted(gateway, open_store(str(tmp_path / "copy"))):
            assert await ask_for_two(agent, 1) == ["first", "second"]
            assert (await gateway.look(created))["num_turns"] == 2
