"""Gateways over one PostgreSQL: what reaches the wrong one is answered by the one that has the session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from support.gateways import CHAT, USER, make_gateway, scripted
from support.postgres import PostgresServer
from support.processes import free_port
from support.servers import listening
from unbroken.errors import InvalidInputError, StoreError
from unbroken.gateway.app import Forwarding
from unbroken.gateway.config import GatewayConfig, OnDisconnect
from unbroken.ledger.store import open_store
from unbroken.ledger.store.sql import SqlSessionStore
from unbroken.server.http.json import SESSION
from unbroken.types import SampleChunk, SampleRequest

ABORT, LIMIT = OnDisconnect.ABORT, 63
AND = {"role": "user", "content": "And?"}


@asynccontextmanager
async def gateway_at(port: int, engine: Any, postgres: PostgresServer, **config: Any) -> AsyncIterator[str]:
    url = f"http://127.0.0.1:{port}"
    store = open_store(postgres.url, advertised=url)
    app = make_gateway(engine, store, gateway=GatewayConfig(advertise=url, drain_s=0.1, **config), api_key="control")
    async with listening(app, port=port):
        yield url


@asynccontextmanager
async def two_gateways(postgres: PostgresServer) -> AsyncIterator[tuple[str, str, httpx.AsyncClient]]:
    """The URLs of two gateways of one store, and a client."""
    engine = scripted("a<|im_end|>")
    async with (
        gateway_at(free_port(), engine, postgres) as first,
        gateway_at(free_port(), engine, postgres) as second,
        httpx.AsyncClient(timeout=60) as client,
    ):
        yield first, second, client


async def create(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(headers={"Authorization": "Bearer control"}) as client:
        created: dict[str, Any] = (await client.post(f"{url}/v1/sessions", json={})).json()
        return created


async def test_any_gateway_answers_for_a_session_as_its_own_does(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="httpx")
    engine, other = scripted("<think>\nso\n</think>\n\nIt is 17.<|im_end|>"), scripted("never<|im_end|>")
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(gateway_at(free_port(), engine, postgres))
        second = await stack.enter_async_context(gateway_at(free_port(), other, postgres))
        created = await create(first)
        path = created["openai_base_url"].removeprefix(first)
        agent = await stack.enter_async_context(httpx.AsyncClient(base_url=second, timeout=60))
        own_key = {"x-api-key": "sk-own"}  # the agent's, which opens nothing
        answer = await agent.post(f"{path}/chat/completions", json={"messages": [USER]}, headers=own_key)
        reply = answer.json()["choices"][0]["message"]
        assert (answer.status_code, reply["content"]) == (200, "It is 17.")
        keyed = {"Authorization": f"Bearer {created['api_key']}"}
        streamed = await agent.post(CHAT, json={"messages": [USER, reply, AND], "stream": True}, headers=keyed)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert len(streamed.headers.get_list("date")) == 1
        refused = await agent.post(f"{path}/chat/completions", json={"messages": 3})
        assert refused.status_code == 400
        control = {"Authorization": "Bearer control"}
        session = f"/v1/sessions/{created['session_id']}"
        assert (await agent.get(session)).status_code == 401
        here = (await agent.get(f"{session}?x=1", headers=control)).json()
        assert (here["num_turns"], here["forks"]) == (2, [])
        ended = await agent.post(f"{session}/finish", json={"reward": 1.0}, headers=control)
        assert ended.json()["status"] == "finished"
    assert other.requests == []
    passed_on = [each for each in caplog.messages if each.startswith(f"HTTP Request: POST {first}/v1/chat")]
    assert len(passed_on) == 3
    assert not any(created["api_key"] in each for each in caplog.messages if f"POST {first}" in each)


async def test_each_part_of_an_answer_comes_at_once_and_a_reader_that_leaves_is_noticed(
    postgres: PostgresServer,
) -> None:
    engine = scripted("one two three four five<|im_end|>")
    stream = engine.stream

    async def stop_after_one(request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        async for chunk in stream(request):
            yield chunk
            await asyncio.Event().wait()

    engine.stream = stop_after_one
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(gateway_at(free_port(), engine, postgres, on_disconnect=ABORT))
        second = await stack.enter_async_context(gateway_at(free_port(), engine, postgres))
        created = await create(first)
        keyed = {"Authorization": f"Bearer {created['api_key']}"}
        client = await stack.enter_async_context(httpx.AsyncClient(headers=keyed, timeout=60))
        body = {"messages": [USER], "stream": True}
        async with client.stream("POST", f"{second}{CHAT}", json=body) as answer:
            async for part in answer.aiter_text():
                assert "data: {" in part
                break
        control = {"Authorization": "Bearer control"}
        async with asyncio.timeout(60):
            while True:
                looked = await client.get(f"{first}/v1/sessions/{created['session_id']}", headers=control)
                if looked.json()["in_flight"] == 0:
                    break
                await asyncio.sleep(0.05)
        assert looked.json()["num_turns"] == 0


async def test_a_session_whose_gateway_cannot_be_reached_is_refused_until_that_has_ended(
    postgres: PostgresServer,
) -> None:
    engine, port = scripted("a<|im_end|>"), free_port()
    store = open_store(postgres.url, advertised=f"http://127.0.0.1:{port}")
    lost = make_gateway(engine, store, api_key="control")
    async with gateway_at(free_port(), engine, postgres) as url, httpx.AsyncClient(timeout=60) as client:
        async with listening(lost) as elsewhere:  # and not at the port that it advertises
            created = await create(elsewhere)
            ask = {"json": {"messages": [USER]}, "headers": {"Authorization": f"Bearer {created['api_key']}"}}
            refused = await client.post(f"{url}{CHAT}", **ask)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "session_elsewhere")
        assert (await client.post(f"{url}{CHAT}", **ask)).status_code == 200


async def test_what_was_passed_on_is_not_passed_on_again(postgres: PostgresServer) -> None:
    async with two_gateways(postgres) as (first, second, client):
        created = await create(first)
        headers = {"Authorization": f"Bearer {created['api_key']}", "X-Unbroken-Forwarded": "1"}
        refused = await client.post(f"{second}{CHAT}", json={"messages": [USER]}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "session_elsewhere")


def test_only_the_url_of_another_gateway_that_runs_is_found(postgres: PostgresServer) -> None:
    async def run() -> None:
        store = open_store(postgres.url, advertised="http://10.0.0.1:8000")
        mute = open_store(f"{postgres.url}&application_name=mine")
        other = open_store(postgres.url)
        async with listening(make_gateway(scripted("a<|im_end|>"), store)) as url:
            created = await create(url)
            assert other.find_owner_url(created["session_id"]) == "http://10.0.0.1:8000"
            assert store.find_owner_url(created["session_id"]) is None
            assert other.find_owner_url("unknown\0") is None
        assert other.find_owner_url(created["session_id"]) is None
        async with listening(make_gateway(scripted("a<|im_end|>"), mute)) as url:
            created = await create(url)
            assert other.find_owner_url(created["session_id"]) is None
        other.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "url",
    [
        "10.0.0.1:8000", "http://" + "x" * (LIMIT - 6), "http://ä", "http://a/path", "http://a?x=1", "http://a#b",
        "http://a:0", "http://a:99999", "http://a:b", "http://", "http://user@a", "http://a ", "http://a?",
    ],
)  # fmt: skip
def test_a_url_that_postgres_would_not_keep_or_that_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError, match="advertise must be an http:// or https:// URL of at most 63 ASCII"):
        GatewayConfig(advertise=url)


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "https://gateway-3.internal", "http://[::1]:80", "http://a/"])
def test_an_address_is_taken_as_it_is(url: str) -> None:
    assert GatewayConfig(advertise=url).advertise == url


async def run_forwarding(find_elsewhere: Callable[[str], Awaitable[str]], **scope: Any) -> list[dict[str, Any]]:
    """What a `Forwarding` answers to a request about the session s; nothing stands behind it."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def app(*_: Any) -> None:
        raise AssertionError

    path = "/v1/messages"
    request = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await Forwarding(app, find_elsewhere=find_elsewhere)(
        {**request, "headers": [], SESSION: "s", **scope}, receive, send
    )
    return sent


async def test_a_store_that_fails_while_the_owner_is_looked_for_is_an_error_of_the_dialect() -> None:
    async def find_elsewhere(session_id: str) -> str:
        raise StoreError("the database is away")

    start, body = await run_forwarding(find_elsewhere)
    error = json.loads(body["body"])
    assert (start["status"], error["type"], error["error"]["code"]) == (503, "error", "store_error")
    assert "the database is away" in error["error"]["message"]


async def test_headers_of_a_connection_are_not_passed_on() -> None:
    heads: list[bytes] = []
    of_connection = b"Connection: close, X-Own\r\nX-Own: 1\r\nTrailer: x\r\nProxy-Authenticate: Basic\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).lower())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-Kept: 1\r\n" + of_connection + b"\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]

        async def find_elsewhere(session_id: str) -> str:
            return f"http://127.0.0.1:{port}"

        headers = {
            b"connection": b"keep-alive, X-Hop",
            b"x-hop": b"1",
            b"proxy-authorization": b"secret",
            b"x-end": b"1",
        }
        start, *_ = await run_forwarding(find_elsewhere, headers=list(headers.items()))
    assert start["headers"] == [(b"content-length", b"0"), (b"x-kept", b"1")]
    assert b"x-end: 1\r\n" in heads[0]
    assert not any(name in heads[0] for name in (b"x-hop", b"secret"))


async def test_a_request_that_comes_while_another_gateway_takes_its_session_is_passed_on(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = scripted("a<|im_end|>")
    find, found = SqlSessionStore.find_owner_url, []

    def find_late(store: SqlSessionStore, session_id: str) -> str | None:
        found.append(None if not found else find(store, session_id))  # the first is asked before the owner is there
        return found[-1]

    async with (
        gateway_at(free_port(), engine, postgres) as first,
        gateway_at(free_port(), engine, postgres) as second,
        httpx.AsyncClient(timeout=60) as client,
    ):
        created = await create(first)
        monkeypatch.setattr(SqlSessionStore, "find_owner_url", find_late)
        headers = {"Authorization": f"Bearer {created['api_key']}"}
        answer = await client.post(f"{second}{CHAT}", json={"messages": [USER]}, headers=headers)
        assert (answer.status_code, found) == (200, [None, first])


async def test_a_path_that_is_not_ascii_behind_a_key_is_passed_on_quoted(postgres: PostgresServer) -> None:
    async with two_gateways(postgres) as (first, second, client):
        created = await create(first)
        root = created["openai_base_url"].removeprefix(first)
        answers = [await client.get(f"{url}{root}/models/schl%C3%BCssel") for url in (first, second)]
        assert [answer.status_code for answer in answers] == [200, 200]


@pytest.mark.parametrize("in_path", [False, True])
async def test_a_key_in_the_query_is_passed_on_in_a_header(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture, in_path: bool
) -> None:
    caplog.set_level("INFO", logger="httpx")
    method = "/v1beta/models/any:streamGenerateContent"
    async with two_gateways(postgres) as (first, second, client):
        created = await create(first)
        root = created["gemini_base_url"].removeprefix(first) if in_path else ""
        query = {"alt": "sse", "key": "their-own" if in_path else created["api_key"]}
        answer = await client.post(
            f"{second}{root}{method}", params=query, json={"contents": [{"parts": [{"text": "x"}]}]}
        )
    assert answer.status_code == 200, answer.text
    (passed_on,) = [each for each in caplog.messages if each.startswith(f"HTTP Request: POST {first}/v1beta")]
    assert "alt=sse" in passed_on
    assert "key" not in passed_on
