"""Limits of a session: turns, ids, seconds, and requests at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.gateways import CALL, CHAT, TOOLS, USER, ask, error, result, running_gateway, scripted
from unbroken.server.http.errors import HttpError
from unbroken.server.turns import Question, RetryHint

REPLY = "It is 17.<|im_end|>"


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
        done, waiting = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED, timeout=20)
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
