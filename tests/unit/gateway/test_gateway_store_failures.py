"""What a session's memory holds is what the store holds, whatever comes in between."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from support.gateways import CHAT, TOOLS, USER, ask, running_gateway, scripted
from support.postgres import run_postgres
from support.servers import encode
from support.waits import wait_until
from unbroken.gateway.config import GatewayConfig
from unbroken.ledger.store.sql import SqlSessionStore


def open_database(folder: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(folder / "sessions.sqlite3", isolation_level=None))


async def test_a_turn_that_is_aborted_while_it_is_written_is_recorded_in_memory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sizes, commit = scripted("a<|im_end|>", "b<|im_end|>"), [], SqlSessionStore.commit
    monkeypatch.setattr(SqlSessionStore, "commit", lambda self, turns: (sizes.append(len(turns)), commit(self, turns)))
    async with running_gateway(engine, tmp_path) as gateway:
        created = await gateway.create(on_disconnect="abort")
        with open_database(tmp_path) as database:
            database.execute("BEGIN IMMEDIATE")  # the turn's commit waits for the end of this
            asking = asyncio.create_task(ask(gateway.agent(created), [USER]))
            await wait_until(lambda: sizes)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await asyncio.sleep(0.05)
            database.execute("ROLLBACK")
        await ask(gateway.agent(created), [{"role": "user", "content": "Another?"}])
        tree = await gateway.look(created, "/tree")
    assert [turn["number"] for turn in tree["turns"]] == [0, 1]
    async with running_gateway(scripted("c<|im_end|>"), tmp_path) as gateway:
        assert await gateway.look(created, "/tree") == tree


async def test_a_session_that_was_taken_over_is_loaded_again_when_it_is_free(tmp_path: Path) -> None:
    async with running_gateway(scripted("a<|im_end|>"), tmp_path) as gateway:
        created = await gateway.create()
        agent = gateway.agent(created)
        first = await ask(agent, [USER])
        with open_database(tmp_path) as database:  # another owner, which has ended
            database.execute("UPDATE sessions SET owner = 2")
        body = {"messages": [USER, first, {"role": "user", "content": "And?"}]}
        refused = await agent.post(CHAT, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "session_elsewhere")
        answered = await agent.post(CHAT, json=body)
        assert answered.status_code == 200, answered.text
        tree = await gateway.look(created, "/tree")
    assert [turn["number"] for turn in tree["turns"]] == [0, 1]


async def test_a_session_that_another_gateway_ended_leaves_memory(tmp_path: Path) -> None:
    config = GatewayConfig(sweep_s=0.05, max_sessions=1)
    async with running_gateway(scripted("a<|im_end|>"), tmp_path, gateway=config) as gateway:
        created = await gateway.create()
        await ask(gateway.agent(created), [USER])
        with open_database(tmp_path) as database:
            database.execute("UPDATE sessions SET status = 'finished'")

        async def has_ended() -> bool:
            return (await gateway.look(created))["status"] == "finished"

        await wait_until(has_ended)
        await gateway.create()


async def test_another_gateway_goes_on_when_the_session_s_own_has_ended() -> None:
    """Over one PostgreSQL: refused while its owner runs, then continued from the ids that the owner recorded."""
    engine = scripted("a<|im_end|>", "b<|im_end|>")
    with run_postgres() as server:
        async with running_gateway(engine, server.url) as second:
            async with running_gateway(engine, server.url) as first:
                created = await first.create()
                reply = await ask(first.agent(created), [USER])
                body = {"messages": [USER, reply, {"role": "user", "content": "And?"}], "tools": TOOLS}
                refused = await second.agent(created).post(CHAT, json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "session_elsewhere")
                tree = await first.look(created, "/tree")
                assert await second.look(created, "/tree") == tree
            answered = await second.agent(created).post(CHAT, json=body)
            assert answered.status_code == 200, answered.text
            session = await second.look(created)
    assert (session["num_turns"], session["forks"]) == (2, [])
    given, after = (request.prompt_ids.tolist() for request in engine.requests)
    assert after[: len(given) + 2] == given + encode("a<|im_end|>")
