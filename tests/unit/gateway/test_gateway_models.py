"""In a session every name of a model means the served one; outside of sessions a name that is unknown is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.gateways import CHAT, USER, ask, running_gateway, scripted


@pytest.mark.parametrize("name", ["gpt-5", "claude-sonnet-4-5", "tiny"])
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
        await ask(agent, [USER], model="pirate")
        assert (await agent.get("/v1/models/pirate")).json()["parent"] == "tiny"
    assert [request.adapter for request in engine.requests] == ["pirate"]


async def test_outside_of_sessions_an_unknown_name_is_an_error(tmp_path: Path) -> None:
    async with running_gateway(scripted("ok<|im_end|>"), tmp_path) as gateway:
        answer = await gateway.client.post(CHAT, json={"messages": [USER], "model": "gpt-5"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert (await gateway.client.get("/v1/models/gpt-5")).status_code == 404
