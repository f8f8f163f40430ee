"""Limits of a session: turns, ids, seconds, and requests at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.gateways import CALL, CHAT, TOOLS, USER, ask, error, restarted, result, running_gateway, scripted
from support.servers import encode, listening, scripted_engine
from support.waits import wait_until
from unbroken.engines.scripted import ScriptedEngine
from unbroken.ledger.store import open_store
from unbroken.server.http.errors import HttpError
from unbroken.server.turns import Question, RetryHint
from unbroken.types import SampleChunk, SampleRequest

REPLY = "It is 17.<|im_end|>"
LONG = [5] * 300


class HaltingEngine(ScriptedEngine):
    """Samples 10 ids of its first request and no more."""

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        is_first = not self.requests
        async for chunk in super().stream(request):
            yield chunk
            if is_first and self.num_sampled == 10:
                await asyncio.Future()


async def test_limits_of_a_session(tmp_path: Path) -> None:
    async with running_gateway(scripted(CALL, REPLY), tmp_path) as gateway:
        body = {"messages": [USER]}
        turns = await gateway.create(limits={"turns": 1})
        first = await ask(gateway.agent(turns), [USER])
        again = {"messages": [USER, first, result(first)], "tools": TOOLS}
        assert error(await gateway.agent(turns).post(CHAT, json=again)) == (403, "session_limit_reached")

        tokens = await gateway.create(limits={"tokens": 3})
        cut = await gateway.agent(tokens).post(CHAT, json=body)
        assert cut.json()["choices"][0]["finish_reason"] == "length"
        refused = await gateway.agent(tokens).post(CHAT, json={"messages": [USER, USER]})
        assert error(refused) == (403, "session_limit_reached")
        assert "limits.tokens is reached: 3 of 3 sampled ids" in refused.json()["error"]["message"]

        seconds = await gateway.create(limits={"seconds": 0.1})
        await asyncio.sleep(0.2)
        assert error(await gateway.agent(seconds).post(CHAT, json=body)) == (403, "session_limit_reached")
        for created, number in ((turns, 1), (tokens, 1), (seconds, 0)):
            assert (await gateway.look(created))["num_turns"] == number


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_limits_of_requests_at_a_time(tmp_path: Path, stream: bool) -> None:
    engine = scripted(REPLY)
    async with running_gateway(engine, tmp_path) as gateway:
        created = await gateway.create(limits={"in_flight": 1})
        agent = gateway.agent(created)
        await engine.pause()
        both = [
            asyncio.create_task(
                agent.post(CHAT, json={"messages": [{"role": "user", "content": text}], "stream": stream})
            )
            for text in ("a", "b")
        ]
        done, waiting = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert error(done.pop().result()) == (429, "session_busy")
        await engine.resume()
        assert (await waiting.pop()).status_code == 200
        assert (await gateway.look(created))["num_turns"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_at_the_same_time_do_not_exceed_the_turns_of_a_session(tmp_path: Path, stream: bool) -> None:
    bodies = [{"messages": [{"role": "user", "content": f"{k}?"}], "stream": stream} for k in range(6)]
    async with running_gateway(scripted(REPLY), tmp_path) as gateway:
        created = await gateway.create(limits={"turns": 2})
        agent = gateway.agent(created)
        answers = await asyncio.gather(*(agent.post(CHAT, json=body) for body in bodies))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 403, 403, 403, 403]
        assert (await gateway.look(created))["num_turns"] == 2

        created = await gateway.create(limits={"in_flight": 2})
        agent = gateway.agent(created)
        answers = await asyncio.gather(*(agent.post(CHAT, json=body) for body in bodies))
        assert {answer.status_code for answer in answers} == {200, 429}
        assert (await gateway.look(created))["in_flight"] == 0


async def test_each_answer_of_a_request_is_a_turn_of_the_limit(tmp_path: Path) -> None:
    async with running_gateway(scripted(REPLY), tmp_path) as gateway:
        created = await gateway.create(limits={"turns": 3})
        agent = gateway.agent(created)
        assert (await agent.post(CHAT, json={"messages": [USER], "n": 2})).status_code == 200
        refused = await agent.post(CHAT, json={"messages": [USER, USER], "n": 2})
        assert error(refused) == (403, "session_limit_reached")
        assert "limits.turns is reached: 2 of 3 turns, and 2 are asked for" in refused.json()["error"]["message"]
        assert (await agent.post(CHAT, json={"messages": [USER, USER]})).status_code == 200
        assert (await gateway.look(created))["num_turns"] == 3


async def test_a_request_that_ends_before_it_is_sampled_takes_no_turn(tmp_path: Path) -> None:
    async with running_gateway(scripted(REPLY), tmp_path) as gateway:
        created = await gateway.create(limits={"turns": 1, "in_flight": 1})
        session = await gateway.app.state.sessions.get_live(created["session_id"])
        context = gateway.app.state.context
        question = Question(messages=[USER], retry=RetryHint(body_sha256="aa"))
        _, leave = await session.open(context, question, id_prefix="x-")
        assert (await gateway.look(created))["in_flight"] == 0
        with pytest.raises(HttpError, match=r"limits\.turns is reached"):
            await session.open(context, question, id_prefix="x-")
        leave(False)
        turn, _ = await session.open(context, question, id_prefix="x-")
        await turn.sample()
        assert (await gateway.look(created))["num_turns"] == 1


def ask_for(number: int, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{number}?"}], **fields}


async def test_64_answers_at_once_share_the_tokens_of_a_session(tmp_path: Path) -> None:
    async with running_gateway(scripted_engine(lambda ids: LONG, allow_forks=True), tmp_path) as gateway:
        created = await gateway.create(limits={"tokens": 200})
        answer = await gateway.agent(created).post(CHAT, json={"messages": [USER], "n": 64})
        assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"length"}
        assert (await gateway.look(created))["num_sampled_tokens"] == 64 * 3
        refused = await gateway.agent(created).post(CHAT, json={"messages": [USER, USER], "n": 9})
        assert error(refused) == (403, "session_limit_reached")
        expected = "limits.tokens is reached: 192 of 200 sampled ids, and 9 are asked for"
        assert expected in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_32_requests_at_once_do_not_exceed_the_tokens_of_a_session(tmp_path: Path, stream: bool) -> None:
    async with running_gateway(scripted_engine(lambda ids: LONG, allow_forks=True), tmp_path) as gateway:
        created = await gateway.create(limits={"tokens": 100})
        agent = gateway.agent(created)
        bodies = [ask_for(k, max_tokens=30, stream=stream) for k in range(32)]
        answers = await asyncio.gather(*(agent.post(CHAT, json=body) for body in bodies))
        assert [answer.status_code for answer in answers].count(200) == 4  # 30, 30, 30, and the last 10
        assert {error(answer)[1] for answer in answers if answer.status_code != 200} <= {
            "session_busy",
            "session_limit_reached",
        }
        assert (await gateway.look(created))["num_sampled_tokens"] == 100
        assert error(await agent.post(CHAT, json=ask_for(99))) == (403, "session_limit_reached")


async def test_replies_that_are_left_out_for_a_required_call_count_as_tokens(tmp_path: Path) -> None:
    async with running_gateway(scripted("No.<|im_end|>", CALL), tmp_path) as gateway:
        created = await gateway.create(limits={"tokens": 200})
        await ask(gateway.agent(created), [USER], tool_choice="required")
        found = await gateway.look(created)
        assert found["counters"]["aborted/sampled_ids"] == len(encode("No.<|im_end|>"))
        assert found["num_sampled_tokens"] == len(encode(CALL))


async def test_what_a_request_reserved_and_did_not_sample_is_given_back(tmp_path: Path) -> None:
    engine = scripted(REPLY)
    async with running_gateway(engine, tmp_path) as gateway:
        created = await gateway.create(limits={"tokens": 100})
        agent = gateway.agent(created)
        await engine.pause()
        first = asyncio.create_task(agent.post(CHAT, json=ask_for(1)))  # it may take all 100
        await wait_until(lambda: engine.requests)
        busy = await agent.post(CHAT, json=ask_for(2))
        assert error(busy) == (429, "session_busy")
        assert busy.headers["Retry-After"]
        await engine.resume()
        assert (await first).status_code == 200
        assert (await agent.post(CHAT, json=ask_for(2))).status_code == 200
        assert [request.params.max_tokens for request in engine.requests] == [
            100,
            100 - (await gateway.look(created))["num_sampled_tokens"] // 2,
        ]


async def test_a_limit_of_tokens_above_the_context_asks_for_no_more_than_fits(tmp_path: Path) -> None:
    async with running_gateway(scripted(REPLY), tmp_path) as gateway:
        created = await gateway.create(limits={"tokens": 1_000_000})
        assert (await ask(gateway.agent(created), [USER]))["content"] == "It is 17."


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_ids_of_an_aborted_request_count_also_after_a_restart(tmp_path: Path, stream: bool) -> None:
    engine = HaltingEngine(lambda ids: LONG, vocab_size=5000, context_length=4096, allow_forks=True)
    store = open_store(str(tmp_path))
    async with running_gateway(engine, store) as gateway, listening(gateway.app) as url:
        created = await gateway.create(limits={"tokens": 25, "turns": 1}, on_disconnect="abort")
        async with httpx.AsyncClient(base_url=url, headers={"x-api-key": created["api_key"]}) as agent:
            asking = asyncio.create_task(agent.post(CHAT, json=ask_for(1, stream=stream)))
            await wait_until(lambda: engine.num_sampled >= 10)
            asking.cancel()
        async with asyncio.timeout(60):
            while not (stored := store.load(created["session_id"])) or not stored.counters:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await gateway.look(created))["counters"] == stored.counters == {"aborted/sampled_ids": 10}
        async with restarted(gateway, store) as again:
            answer = await again.agent(created).post(CHAT, json=ask_for(1, stream=False))
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            assert answer.json()["usage"]["completion_tokens"] == 15
