"""A retried request is not sampled twice."""

import asyncio
import gc
import weakref
from collections import Counter
from typing import Any

import httpx
import pytest

from support.servers import asgi_client, listening, make_app, scripted_engine
from support.waits import wait_until
from unbroken.server.config import ServerLimits
from unbroken.server.http import idempotency
from unbroken.server.http.errors import HttpError
from unbroken.server.http.idempotency import ABANDON_PATH, Idempotency, ReplayBody
from unbroken.server.http.json import json_response
from unbroken.server.metrics import Metrics

BODY = {"prompts": [[1, 2, 3]], "params": {"max_tokens": 50}}
KEY = {"Idempotency-Key": "one"}


async def test_the_same_key_gives_the_same_answer_without_sampling() -> None:
    engine = scripted_engine(lambda prompt_ids: [7] * 50)
    async with asgi_client(make_app(engine)) as client:
        first = await client.post("/v1/sample", json=BODY, headers=KEY)
        second = await client.post("/v1/sample", json=BODY, headers=KEY)
        assert first.content == second.content
        assert engine.num_sampled == 50
        assert "unbroken_requests_repeated_total 1.0" in (await client.get("/metrics")).text
        await client.post("/v1/sample", json=BODY, headers={"Idempotency-Key": "two"})
        assert engine.num_sampled == 100


async def test_tries_at_the_same_time_share_one_request() -> None:
    engine = scripted_engine(lambda prompt_ids: [7] * 50)
    async with asgi_client(make_app(engine)) as client:
        answers = await asyncio.gather(*(client.post("/v1/sample", json=BODY, headers=KEY) for _ in range(5)))
    assert len({answer.content for answer in answers}) == 1
    assert engine.num_sampled == 50


async def test_a_retry_finds_the_work_that_its_broken_connection_left() -> None:
    engine = scripted_engine(lambda prompt_ids: [7] * 50)
    async with listening(make_app(engine)) as url, httpx.AsyncClient(base_url=url) as client:
        await engine.pause()
        with pytest.raises(httpx.TimeoutException):
            await client.post("/v1/sample", json=BODY, headers=KEY, timeout=0.1)
        await asyncio.sleep(0.1)
        await engine.resume()
        answer = await client.post("/v1/sample", json=BODY, headers=KEY)
        assert answer.status_code == 200
        assert len(engine.requests) == 1


async def test_another_body_under_the_same_key_is_refused() -> None:
    async with asgi_client(make_app(scripted_engine("hi"))) as client:
        await client.post("/v1/sample", json=BODY, headers=KEY)
        answer = await client.post("/v1/sample", json={**BODY, "n": 2}, headers=KEY)
    assert answer.status_code == 400
    assert "another body" in answer.json()["error"]["message"]


async def test_an_answer_is_kept_for_a_time_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted_engine(lambda prompt_ids: [7] * 50)
    async with asgi_client(make_app(engine)) as client:
        for kept_s, num_sampled in ((600.0, 50), (600.0, 50), (0.0, 100)):
            monkeypatch.setattr(idempotency, "_KEPT_S", kept_s)
            await client.post("/v1/sample", json=BODY, headers=KEY)
            assert engine.num_sampled == num_sampled


async def test_of_answers_that_are_too_large_together_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted_engine(lambda prompt_ids: [7] * 50)
    async with asgi_client(make_app(engine)) as client:
        first = await client.post("/v1/sample", json=BODY, headers=KEY)
        each = len(first.content) + idempotency._ENTRY_BYTES
        monkeypatch.setattr(idempotency, "_MAX_KEPT_BYTES", each * 3 // 2)
        await client.post("/v1/sample", json=BODY, headers={"Idempotency-Key": "two"})
        assert engine.num_sampled == 100
        await client.post("/v1/sample", json=BODY, headers={"Idempotency-Key": "two"})
        assert engine.num_sampled == 100
        await client.post("/v1/sample", json=BODY, headers=KEY)
        assert engine.num_sampled == 150


async def test_an_answer_that_asks_for_a_retry_is_not_kept() -> None:
    engine = scripted_engine(lambda prompt_ids: [7] * 500)
    async with asgi_client(make_app(engine, limits=ServerLimits(max_queued=1))) as client:
        await engine.pause()
        first = asyncio.create_task(client.post("/v1/sample", json={**BODY, "params": {"max_tokens": 500}}))
        await wait_until(lambda: engine.requests)
        assert (await client.post("/v1/sample", json=BODY, headers=KEY)).status_code == 429
        await engine.resume()
        await first
        assert (await client.post("/v1/sample", json=BODY, headers=KEY)).status_code == 200


async def test_work_that_is_abandoned_before_it_began_leaves_nothing() -> None:
    """A key was answered with a cancellation for ever if its work was cancelled before its first step."""
    layer = Idempotency(answer_ok, metrics=Metrics())

    async def post(path: str) -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"idempotency-key", b"k")]}
        await layer(scope, ReplayBody(b"{}"), send)
        return sent

    async def post_and_abandon() -> None:
        task = asyncio.create_task(post("/v1/sample"))
        await asyncio.sleep(0)  # its work exists, and has not begun
        assert b"true" in (await post(ABANDON_PATH))[1]["body"]
        with pytest.raises(HttpError, match="abandoned"):
            await task

    await post_and_abandon()
    assert (await post("/v1/sample"))[0]["status"] == 200


async def test_work_that_ends_long_after_it_was_abandoned_does_not_end_its_retry() -> None:
    """The grace period of the first try removed the entry of the second, or failed in the event loop."""
    may_end = asyncio.Event()

    async def end_late(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await may_end.wait()

    layer = Idempotency(end_late, metrics=Metrics(), grace_s=0.02)
    scope = {"type": "http", "method": "POST", "path": "/v1/sample", "headers": [(b"idempotency-key", b"k")]}
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    async def send(message: Any) -> None:
        pass

    first = asyncio.create_task(layer(dict(scope), ReplayBody(b"{}"), send))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait({first})
    await layer({**scope, "path": ABANDON_PATH}, ReplayBody(b"{}"), send)
    second = asyncio.create_task(layer(dict(scope), ReplayBody(b"{}"), send))
    await asyncio.sleep(0.1)
    assert not failures
    assert len(layer._entries) == 1
    second.cancel()
    may_end.set()
    await asyncio.wait({second})


async def answer_ok(scope: Any, receive: Any, send: Any) -> None:
    await json_response({})(scope, receive, send)


class Held:
    """What an application puts into a request's scope."""


async def ask(layer: Idempotency, key: bytes, held: Any = None) -> list[Any]:
    """What a request with the key is answered."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/sample", "headers": [(b"idempotency-key", key)]}
    await layer({**scope, "held": held}, ReplayBody(b"{}"), send)
    return sent


async def test_a_kept_answer_keeps_nothing_of_its_request() -> None:
    """Its scope, exit stacks and task were kept too, 7 kB of memory for each answer of ten minutes."""
    layer, held = Idempotency(answer_ok, metrics=Metrics()), Held()
    first = await ask(layer, b"one", held)
    reference = weakref.ref(held)
    del held
    gc.collect()
    assert reference() is None
    assert await ask(layer, b"one") == first


async def test_many_small_answers_count_with_what_an_entry_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies alone were counted: of 2 bytes each, 130 million were kept before one was dropped."""
    num_asked: Counter[bytes] = Counter()

    async def count(scope: Any, receive: Any, send: Any) -> None:
        num_asked[dict(scope["headers"])[b"idempotency-key"]] += 1
        await answer_ok(scope, receive, send)

    layer = Idempotency(count, metrics=Metrics())
    monkeypatch.setattr(idempotency, "_MAX_KEPT_BYTES", 10 * idempotency._ENTRY_BYTES)
    for number in range(12):
        await ask(layer, b"%d" % number)
    await ask(layer, b"11")
    assert num_asked[b"11"] == 1
    await ask(layer, b"0")
    assert num_asked[b"0"] == 2


async def test_a_kept_answer_is_refused_for_another_body() -> None:
    layer = Idempotency(answer_ok, metrics=Metrics())
    await ask(layer, b"one")
    scope = {"type": "http", "method": "POST", "path": "/v1/sample", "headers": [(b"idempotency-key", b"one")]}
    with pytest.raises(HttpError, match="another body"):
        await layer(scope, ReplayBody(b"[]"), answer_ok)


async def test_kept_answers_count_under_their_route() -> None:
    async with asgi_client(make_app(scripted_engine(lambda prompt_ids: [7] * 5))) as client:
        for _ in range(3):
            await client.post("/v1/sample", json={"prompts": [[1]], "params": {"max_tokens": 5}}, headers=KEY)
        await client.post(ABANDON_PATH, headers=KEY)
        text = (await client.get("/metrics")).text
    assert 'unbroken_requests_total{route="/v1/sample",status="200"} 3.0' in text
    assert 'unbroken_requests_total{route="/v1/abandon",status="200"} 1.0' in text
    assert 'route="unknown"' not in text
