"""Which requests of a session are the same question asked again, and which are further samples of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.gateways import CHAT, USER, error, running_gateway, scripted
from support.servers import listening
from support.waits import wait_until

BODY: dict[str, Any] = {"messages": [USER]}
REPLIES = tuple(f"It is {k}.<|im_end|>" for k in range(8))
FIRST, AGAIN = {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}


def read_content(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


@pytest.mark.parametrize("headers", [{}, FIRST], ids=["a client without retries", "an SDK"])
async def test_equal_requests_at_once_are_samples(tmp_path: Path, headers: dict[str, str]) -> None:
    engine = scripted(*REPLIES)
    async with running_gateway(engine, tmp_path) as gateway:
        created = await gateway.create()
        agent = gateway.agent(created)
        answers = await asyncio.gather(*(agent.post(CHAT, json=BODY, headers=headers) for _ in range(5)))
        assert sorted(map(read_content, answers)) == [f"It is {k}." for k in range(5)]
        assert (await gateway.look(created))["num_turns"] == 5
        assert len((await gateway.look(created, "/samples"))["samples"]) == 5


@pytest.mark.parametrize("headers", [AGAIN, {"Idempotency-Key": "task-4"}], ids=["retry header", "key"])
async def test_a_request_that_says_it_is_a_repetition_is_sampled_once(tmp_path: Path, headers: dict[str, str]) -> None:
    engine = scripted(*REPLIES)
    async with running_gateway(engine, tmp_path) as gateway:
        created = await gateway.create()
        agent = gateway.agent(created)
        answers = await asyncio.gather(*(agent.post(CHAT, json=BODY, headers=headers) for _ in range(2)))
        assert [read_content(answer) for answer in answers] == ["It is 0."] * 2
        assert (await gateway.look(created))["num_turns"] == len(engine.requests) == 1


async def test_a_request_whose_readers_are_gone_is_joined_once(tmp_path: Path) -> None:
    engine = scripted(*REPLIES)
    async with running_gateway(engine, tmp_path) as gateway, listening(gateway.app) as url:
        created = await gateway.create()
        await engine.pause()
        async with httpx.AsyncClient(base_url=url, headers={"x-api-key": created["api_key"]}) as client:
            leaving = asyncio.create_task(client.post(CHAT, json=BODY))
            await wait_until(lambda: engine.requests)
            leaving.cancel()
        session = await gateway.app.state.sessions.get_live(created["session_id"])
        (attempts,) = session._attempts._by_body.values()
        await wait_until(lambda: attempts[0].num_requests == 0)
        agent = gateway.agent(created)
        both = [asyncio.create_task(agent.post(CHAT, json=BODY)) for _ in range(2)]
        await wait_until(lambda: len(engine.requests) == 2)
        await engine.resume()
        answers = await asyncio.gather(*both)
        assert sorted(map(read_content, answers)) == ["It is 0.", "It is 1."]
        assert (await gateway.look(created))["num_turns"] == 2


async def test_retries_of_equal_requests_each_get_their_own_answer(tmp_path: Path) -> None:
    engine = scripted(*REPLIES)
    async with running_gateway(engine, tmp_path) as gateway, listening(gateway.app) as url:
        created = await gateway.create()
        agent = gateway.agent(created)
        await engine.pause()
        async with httpx.AsyncClient(base_url=url, headers={"x-api-key": created["api_key"]}) as client:
            leaving = [asyncio.create_task(client.post(CHAT, json=BODY, headers=FIRST)) for _ in range(2)]
            await wait_until(lambda: len(engine.requests) == 2)
            staying = asyncio.create_task(agent.post(CHAT, json=BODY, headers=FIRST))
            await wait_until(lambda: len(engine.requests) == 3)
            for one in leaving:
                one.cancel()
        session = await gateway.app.state.sessions.get_live(created["session_id"])
        (attempts,) = session._attempts._by_body.values()
        await wait_until(lambda: [attempt.num_requests for attempt in attempts] == [0, 0, 1])
        await engine.resume()
        answers = [await staying, *[await agent.post(CHAT, json=BODY, headers=AGAIN) for _ in range(2)]]
        assert sorted(map(read_content, answers)) == ["It is 0.", "It is 1.", "It is 2."]


async def test_a_key_is_refused_with_another_body_and_is_another_request_than_other_keys(tmp_path: Path) -> None:
    async with running_gateway(scripted(*REPLIES), tmp_path) as gateway:
        created = await gateway.create()
        agent = gateway.agent(created)
        answers = [await agent.post(CHAT, json=BODY, headers={"Idempotency-Key": key}) for key in "aba"]
        assert [read_content(answer) for answer in answers] == ["It is 0.", "It is 1.", "It is 0."]
        other = {"messages": [{"role": "user", "content": "Another question."}]}
        refused = await agent.post(CHAT, json=other, headers={"Idempotency-Key": "a"})
        assert error(refused) == (400, "idempotency_key_reused")
        assert "another body" in refused.json()["error"]["message"]
        assert (await gateway.look(created))["num_turns"] == 2


async def test_an_idempotency_key_holds_in_its_session_only(tmp_path: Path) -> None:
    engine = scripted(*REPLIES)
    async with running_gateway(engine, tmp_path) as gateway:
        sessions = [await gateway.create() for _ in range(2)]
        body, headers = {"messages": [USER]}, {"Idempotency-Key": "task-4"}
        agents = [gateway.agent(created) for created in sessions]
        answers = [await agent.post(CHAT, json=body, headers=headers) for agent in (*agents, agents[0])]
        assert [answer.status_code for answer in answers] == [200] * 3
        ids = [answer.json()["id"] for answer in answers]
        assert ids[0] == ids[2] != ids[1]
        assert [(await gateway.look(created))["num_turns"] for created in sessions] == [1, 1]
    assert len(engine.requests) == 2
