"""A name that claims to be a policy is answered by it or refused at every door; in a session others mean its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.gateways import CHAT, USER, Gateway, ask, error, running_gateway, scripted
from support.servers import listening, make_app
from support.stock_server import StockServer
from unbroken.engines.http import HttpEngine
from unbroken.gateway.serve import UpstreamPolicies
from unbroken.weights.sources import TensorSource

DOORS: dict[str, Any] = {
    CHAT: {"messages": [USER]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 4},
}
"""What an agent can call in a session."""
OTHER_DOORS: dict[str, Any] = {
    **DOORS,
    "/v1/completions": {"prompt": "hi"},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
    "/v1/chat/completions/tokens": {"messages": [USER], "tokens": [1]},
    "/v1/sample": {"prompts": [[1]]},
    "/tokenize": {"prompt": "hi"},
}
CLAIMS = ["tiny@3", "nobody@latest", "nobody@7", "pirate@1", "tinker://run/sampler_weights/a", "tinker://run@latest"]


@pytest.mark.parametrize("name", ["gpt-5", "claude-sonnet-4-5"])
async def test_an_agent_may_call_the_model_what_it_likes(tmp_path: Path, name: str) -> None:
    engine = scripted("ok<|im_end|>")
    async with running_gateway(engine, tmp_path, api_key="k") as gateway:
        agent = gateway.agent(await gateway.create())
        assert (await ask(agent, [USER], model=name))["content"] == "ok"
        listed = (await agent.get("/v1/models")).json()["data"]
        found = await agent.get(f"/v1/models/{name}")
    assert [one["id"] for one in listed] == ["tiny"]
    assert (found.status_code, found.json()) == (200, {**listed[0], "id": name, "created": found.json()["created"]})
    assert [request.adapter for request in engine.requests] == [None]


async def test_a_name_of_an_adapter_is_the_adapter(tmp_path: Path) -> None:
    engine = scripted("ok<|im_end|>")
    async with running_gateway(engine, tmp_path, adapters=("pirate",)) as gateway:
        agent = gateway.agent(await gateway.create())
        for name in ("pirate", "pirate@latest", "pirate@0"):
            await ask(agent, [USER], model=name)
            entry = (await agent.get(f"/v1/models/{name}")).json()
            assert (entry["parent"], entry["policy"], entry["policy_version"]) == ("tiny", "pirate", 0)
    assert [request.adapter for request in engine.requests] == ["pirate"] * 3


@pytest.mark.parametrize("name", CLAIMS)
async def test_a_name_that_claims_to_be_a_policy_is_no_habit_of_an_agents(tmp_path: Path, name: str) -> None:
    engine = scripted("ok<|im_end|>")
    async with running_gateway(engine, tmp_path, adapters=("pirate",), any_model_name=True) as gateway:
        agent = gateway.agent(await gateway.create())
        for door, body in DOORS.items():
            answer = await agent.post(door, json={**body, "model": name})
            assert error(answer) == (404, "model_not_found"), door
            assert "this server has ['tiny', 'tiny@0', 'pirate']" in answer.text
        assert (await agent.get(f"/v1/models/{name}")).status_code == 404
        assert error(await gateway.client.post("/v1/sessions", json={"policy": name})) == (404, "model_not_found")
    assert not engine.requests


async def test_all_doors_resolve_names_alike_outside_of_sessions(tmp_path: Path) -> None:
    engine = scripted("ok<|im_end|>")
    async with running_gateway(engine, tmp_path, adapters=("pirate",)) as gateway:
        for door, body in OTHER_DOORS.items():
            field = "adapter" if door == "/v1/sample" else "model"
            for name in ("gpt-5", "tiny@1", "tinker://run@latest"):
                refused = await gateway.client.post(door, json={**body, field: name})
                assert error(refused) == (404, "model_not_found"), door
            assert not engine.requests
            for name in ("tiny", "tiny@latest", "tiny@0", "pirate", "pirate@0"):
                answer = await gateway.client.post(door, json={**body, field: name})
                assert answer.status_code == 200, answer.text
            asked, engine.requests[:] = [request.adapter for request in engine.requests], []
            assert asked == ([] if door == "/tokenize" else [None, None, None, "pirate", "pirate"]), door
        assert (await gateway.client.get("/v1/models/gpt-5")).status_code == 404


async def test_any_name_of_a_model_is_taken_outside_of_sessions_if_the_server_is_told_to(tmp_path: Path) -> None:
    async with running_gateway(scripted("ok<|im_end|>"), tmp_path, any_model_name=True) as gateway:
        for door, body in DOORS.items():
            assert (await gateway.client.post(door, json={**body, "model": "gpt-5"})).status_code == 200
        assert error(await gateway.client.post("/v1/sessions", json={"policy": "gpt-5"})) == (404, "model_not_found")


async def test_a_habit_means_the_policy_of_its_session_and_each_turn_says_who_answered(tmp_path: Path) -> None:
    engine = scripted("ok<|im_end|>")
    async with running_gateway(engine, tmp_path, adapters=("pirate",)) as gateway:
        created = await gateway.create(policy="pirate", sampling={"top_p": 0.5, "temperature": 0.7})
        assert created["model"] == "pirate"
        agent = gateway.agent(created)
        for fields in ({"model": "gpt-5"}, {}, {"model": created["model"]}, {"model": "tiny"}):
            await ask(agent, [USER], **fields)
        turns = (await gateway.look(created, "/tree"))["turns"]
    assert [request.adapter for request in engine.requests] == ["pirate", "pirate", "pirate", None]
    assert [turn["policy"] for turn in turns] == ["pirate", "pirate", "pirate", "tiny"]
    assert turns[0]["policy_versions"] == [[0, 3, 0]]
    assert turns[0]["sampling"] == {"temperature": 0.7, "top_p": 0.5}


async def test_a_session_follows_its_policy_or_stays_at_the_version_of_its_creation(tmp_path: Path) -> None:
    engine = scripted("ok<|im_end|>")
    async with running_gateway(engine, tmp_path) as gateway:
        follows, stays = await gateway.create(), await gateway.create(follow=False)
        named, latest = await gateway.create(policy="tiny@0"), await gateway.create(policy="tiny@latest")
        assert [each["model"] for each in (follows, stays, named, latest)] == [
            "tiny",
            "tiny@0",
            "tiny@0",
            "tiny@latest",
        ]
        for created in (follows, stays, named, latest):
            await ask(gateway.agent(created), [USER], model="gpt-5")
        await engine.update_weights(TensorSource([]), policy_version=1)
        for created in (follows, latest):
            await ask(gateway.agent(created), [USER], model="gpt-5")
            turns = (await gateway.look(created, "/tree"))["turns"]
            versions = [[version for _, _, version in turn["policy_versions"]] for turn in turns]
            assert versions == [[0], [1]]
        num_asked = len(engine.requests)
        for created in (stays, named):
            answer = await gateway.agent(created).post(CHAT, json={"messages": [USER], "model": "gpt-5"})
            assert error(answer) == (404, "model_not_found")
            assert "'tiny@0' does not exist: this server has ['tiny', 'tiny@1']" in answer.text
    assert len(engine.requests) == num_asked


async def test_what_a_habit_means_stays_for_a_session_and_is_looked_up_by_the_next(tmp_path: Path) -> None:
    engine = scripted("ok<|im_end|>")
    engine.adapters = []
    engine.load_adapter = engine.unload_adapter = lambda *_: None
    async with running_gateway(engine, tmp_path) as gateway:
        agent = gateway.agent(await gateway.create())
        await ask(agent, [USER], model="pirate")
        engine.adapters.append("pirate")
        await ask(agent, [USER], model="pirate")
        await ask(gateway.agent(await gateway.create()), [USER], model="pirate")
    assert [request.adapter for request in engine.requests] == [None, None, "pirate"]


@asynccontextmanager
async def over_upstream(app: Any, folder: Path) -> AsyncIterator[Gateway]:
    """A gateway that calls the served model `tiny`, over an upstream."""
    async with listening(app) as url:
        engine = await HttpEngine.connect([url], vocab_size=591)
        try:
            async with running_gateway(engine, folder, source=UpstreamPolicies(engine, "tiny")) as gateway:
                yield gateway
        finally:
            await engine.close()


async def test_a_gateway_asks_its_upstream_what_a_name_means(tmp_path: Path) -> None:
    inner = scripted("ok<|im_end|>")
    inner.adapters = []
    inner.load_adapter = inner.unload_adapter = lambda *_: None
    async with over_upstream(make_app(inner, model_name="upstream"), tmp_path) as gateway:
        habit = gateway.agent(await gateway.create(policy="tiny"))
        await ask(habit, [USER], model="pirate")
        inner.adapters.append("pirate")
        await inner.update_weights(TensorSource([]), policy_version=2)
        await ask(habit, [USER], model="pirate")
        pinned = await gateway.create(policy="pirate", follow=False)
        agent = gateway.agent(pinned)
        for name in ("gpt-5", "pirate", "upstream", "tiny", "upstream@2", "tiny@2"):
            await ask(agent, [USER], model=name)
        turns = (await gateway.look(pinned, "/tree"))["turns"]
        asked = [request.adapter for request in inner.requests]
        for name in ("tinker://run/weights/a", "pirate@1", "upstream@1", "nobody@latest"):
            refused = await agent.post(CHAT, json={"messages": [USER], "model": name})
            assert error(refused) == (404, "model_not_found")
            assert "this server has ['upstream', 'upstream@2', 'pirate']" in refused.text
        assert len(inner.requests) == len(asked)
        inner.adapters.clear()  # a name that meant something is passed on, and refused there
        assert error(await agent.post(CHAT, json={"messages": [USER], "model": "gpt-5"})) == (404, "model_not_found")
    assert pinned["model"] == "pirate@2"
    assert asked == [None, None, "pirate", "pirate", None, None, None, None]
    assert [turn["policy"] for turn in turns] == ["pirate", "pirate", "tiny", "tiny", "tiny", "tiny"]


async def test_a_gateway_over_stock_vllm_knows_the_names_that_it_lists(tmp_path: Path) -> None:
    stock = StockServer(scripted("ok<|im_end|>"), adapters=("pirate",))
    async with over_upstream(stock.make_app(), tmp_path) as gateway:
        agent = gateway.agent(await gateway.create(policy="pirate"))
        num_probes = len(stock.bodies)
        for name in ("gpt-5", stock.name, "pirate@latest", "pirate@0"):
            await ask(agent, [USER], model=name)
        refused = await gateway.client.post("/v1/sessions", json={"follow": False})
        assert error(refused)[0] == 400
        assert "the upstream does not say its version before it samples: name one, such as tiny@3" in refused.text
        for name in ("tinker://run@latest", "nobody@latest", "pirate@1"):
            answer = await agent.post(CHAT, json={"messages": [USER], "model": name})
            assert error(answer) == (404, "model_not_found")
    asked = [body.get("model") for body in stock.bodies[num_probes:]]
    assert asked == ["pirate", None, "pirate", "pirate", "pirate"]  # the last one's ids, of version 0, were dropped


async def test_ids_of_another_version_than_the_one_that_was_named_are_dropped(tmp_path: Path) -> None:
    """The weights come after the question was taken, and between two ids of its answer."""
    engine = scripted("ok<|im_end|>")
    async with running_gateway(engine, tmp_path) as gateway:
        for stream in (False, True):
            agent = gateway.agent(await gateway.create(policy=f"tiny@{engine.policy_version}"))
            await engine.pause()
            body = {"messages": [USER], "stream": stream}
            answering = asyncio.create_task(agent.post(CHAT, json=body))
            while len(engine.requests) == int(stream):  # noqa: ASYNC110  # it is a turn of the loop
                await asyncio.sleep(0)
            await engine.update_weights(TensorSource([]), policy_version=engine.policy_version + 1)
            await engine.resume()
            assert "weights have no version" in (await answering).text
        sessions = (await gateway.client.get("/v1/sessions")).json()["sessions"]
        assert [(await gateway.look(each, ""))["num_turns"] for each in sessions] == [0, 0]
