"""The client's methods for sessions, blocking and not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from support.gateways import CHAT, USER, running_gateway, scripted
from support.image_servers import CAT, DOG, data_url, expanded, processor, tokenizer, user_message, vision_engine
from support.servers import encode, listening
from unbroken.client import AsyncClient, Client
from unbroken.errors import InvalidInputError, SamplingError, SessionEndedError, UnknownSessionError
from unbroken.gateway.app import create_gateway
from unbroken.images.loader import ImageLoader
from unbroken.images.processor import ImageInputs
from unbroken.ledger.records import StoredSession
from unbroken.ledger.store import open_store
from unbroken.ledger.store.base import SessionStore
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.template import TemplateRenderer
from unbroken.server.config import ServerConfig

REPLY = "It is 17.<|im_end|>"


@asynccontextmanager
async def gateway_url(folder: Path) -> AsyncIterator[str]:
    """A gateway with a port, whose key is `k`."""
    async with running_gateway(scripted(REPLY), folder, api_key="k") as gateway, listening(gateway.app) as url:
        yield url


async def ask_once(base_url: str, api_key: str) -> None:
    async with httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}) as agent:
        answer = await agent.post(CHAT.removeprefix("/v1"), json={"messages": [USER]})
        assert answer.status_code == 200, answer.text


async def test_a_session_from_creation_to_rows(tmp_path: Path) -> None:
    async with gateway_url(tmp_path) as url, AsyncClient(url, api_key="k") as client:
        created = await client.sessions.create({"metadata": {"task": 4}, "limits": {"turns": 3}})
        await ask_once(created["openai_base_url"], created["api_key"])
        view = await client.sessions.get(created["session_id"])
        assert (view["status"], view["num_turns"], view["settings"]["metadata"]) == ("open", 1, {"task": 4})
        tree = await client.sessions.tree(created["session_id"])
        assert [node["origin"] for node in tree["nodes"]] == ["prompt", "sampled"]
        finished = await client.sessions.finish(created["session_id"], {"reward": 0.5})
        assert (finished["status"], (finished["outcome"] or {})["reward"]) == ("finished", 0.5)
        (row,) = await client.sessions.samples(created["session_id"])
        (scaled,) = await client.sessions.samples(created["session_id"], advantage=-1.5)
    assert row.token_ids[row.sampled_mask].tolist() == encode(REPLY)
    assert row.advantages[row.loss_mask].tolist() == [0.5] * len(encode(REPLY))
    assert scaled.advantages[scaled.loss_mask].tolist() == [-1.5] * len(encode(REPLY))
    assert np.isnan(row.rollout_logprobs[~row.sampled_mask]).all()


class CountingStore:
    """A store that counts the images and the sessions which are loaded."""

    def __init__(self, store: SessionStore) -> None:
        self.num_loaded = 0
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def load(self, session_id: str) -> StoredSession | None:
        self.num_loaded += 1
        return self._store.load(session_id)

    def load_image(self, sha256: str) -> bytes | None:
        self.num_loaded += 1
        return self._store.load_image(sha256)


def make_vision_gateway(engine: Any, store: Any) -> Any:
    inputs = ImageInputs(processor=processor(), loader=ImageLoader(files=False))
    return create_gateway(
        engine,
        lambda options: TemplateRenderer(tokenizer(), template_kwargs=options, images=inputs),
        TextCodec(tokenizer()),
        ServerConfig(model_name="tiny"),
        store=store,
        image_processor=processor(),
    )


@pytest.mark.parametrize("by", ["previous_response_id", "conversation"])
async def test_answers_with_images_are_named_after_a_restart(tmp_path: Path, by: str) -> None:
    """The images come from the disk, beside those of the request: the prompt continues the recorded ids."""
    engine = vision_engine()

    def show(image: Any) -> dict[str, Any]:
        parts = [{"type": "input_text", "text": "what"}, {"type": "input_image", "image_url": data_url(image)}]
        return {"role": "user", "content": parts}

    body: dict[str, Any] = {"input": [show(CAT)]}
    async with listening(make_vision_gateway(engine, open_store(str(tmp_path)))) as url, AsyncClient(url) as client:
        created = await client.sessions.create()
        async with httpx.AsyncClient(base_url=f"{url}/s/{created['api_key']}/v1") as agent:
            if by == "conversation":
                body["conversation"] = (await agent.post("/conversations", json={})).json()["id"]
            answer = await agent.post("/responses", json=body)
            assert answer.status_code == 200, answer.text
    if by == "previous_response_id":
        body[by] = answer.json()["id"]
    async with listening(make_vision_gateway(engine, open_store(str(tmp_path)))) as url, AsyncClient(url) as client:
        async with httpx.AsyncClient(base_url=f"{url}/s/{created['api_key']}/v1") as agent:
            answer = await agent.post("/responses", json={**body, "input": [show(DOG)]})
            assert answer.status_code == 200, answer.text
            refused = await agent.post("/responses", json={**body, "input": [{**show(DOG), "role": "assistant"}]})
            assert refused.status_code == 400
        (row,) = await client.sessions.samples(created["session_id"])
        session = await client.sessions.get(created["session_id"])
    assert (session["num_turns"], session["forks"]) == (2, [])
    assert [span.image.data for span in row.images] == [CAT.data, DOG.data]
    assert [row.token_ids[span.offset : span.stop].tolist() for span in row.images] == [expanded(CAT), expanded(DOG)]


async def test_rows_have_their_images(tmp_path: Path) -> None:
    store: Any = CountingStore(open_store(str(tmp_path)))
    async with listening(make_vision_gateway(vision_engine(), store)) as url, AsyncClient(url) as client:
        created = await client.sessions.create()
        async with httpx.AsyncClient(base_url=created["openai_base_url"]) as agent:
            message = user_message("what", data_url(CAT), "and", data_url(DOG))
            assert (await agent.post("/chat/completions", json={"messages": [message]})).status_code == 200
        (row,) = await client.sessions.samples(created["session_id"])
        assert await client.sessions.image(created["session_id"], CAT.sha256) == CAT.data
        with pytest.raises(InvalidInputError, match="the session has no image"):
            await client.sessions.image(created["session_id"], "0" * 64)
        await client.sessions.finish(created["session_id"])
        num_before = store.num_loaded
        assert await client.sessions.image(created["session_id"], DOG.sha256) == DOG.data
        assert store.num_loaded == num_before + 1  # not the session for it
        with pytest.raises(InvalidInputError, match="the session has no image"):
            await client.sessions.image(created["session_id"], "0" * 64)
        with pytest.raises(UnknownSessionError, match="no session 'none such'"):
            await client.sessions.image("none such", CAT.sha256)
    assert [span.image.data for span in row.images] == [CAT.data, DOG.data]
    assert [row.token_ids[span.offset : span.stop].tolist() for span in row.images] == [expanded(CAT), expanded(DOG)]


async def test_sessions_are_listed_by_status_over_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unbroken.client.sessions._PAGE", 2)
    async with gateway_url(tmp_path) as url, AsyncClient(url, api_key="k") as client:
        names = [(await client.sessions.create())["session_id"] for _ in range(5)]
        await client.sessions.finish(names[1])
        assert [one["session_id"] for one in await client.sessions.list()] == names
        assert [one["session_id"] for one in await client.sessions.list(status="finished")] == [names[1]]
        await client.sessions.delete(names[0])
        assert len(await client.sessions.list()) == 4


async def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    async with gateway_url(tmp_path) as url, AsyncClient(url, api_key="k") as client:
        with pytest.raises(InvalidInputError, match=r"limits.turns must be greater than or equal to 1, got 0"):
            await client.sessions.create({"limits": {"turns": 0}})
        with pytest.raises(InvalidInputError, match="temprature is not a known field"):
            await client.sessions.create({"sampling": {"temprature": 1.0}})
        for missing in (client.sessions.get, client.sessions.tree, client.sessions.samples, client.sessions.delete):
            with pytest.raises(UnknownSessionError, match="no session 'none such'"):
                await missing("none such")
        name = (await client.sessions.create())["session_id"]
        with pytest.raises(SamplingError, match="reward must be a valid number, got 'much'"):
            await client.sessions.finish(name, {"reward": "much"})
        await client.sessions.finish(name, {"reward": 1.0})
        with pytest.raises(SessionEndedError, match="finished"):
            await client.sessions.finish(name, {"reward": 2.0})


async def test_the_blocking_client_has_the_same_methods(tmp_path: Path) -> None:
    def work(url: str) -> None:
        with Client(url, api_key="k") as client:
            created = client.sessions.create({"metadata": {"a": 1}})
            asyncio.run(ask_once(created["openai_base_url"], created["api_key"]))
            assert client.sessions.get(created["session_id"])["num_turns"] == 1
            assert len(client.sessions.samples(created["session_id"])) == 1
            assert client.sessions.tree(created["session_id"])["turns"][0]["number"] == 0
            assert [one["session_id"] for one in client.sessions.list()] == [created["session_id"]]
            client.sessions.finish(created["session_id"])
            client.sessions.delete(created["session_id"])

    async with gateway_url(tmp_path) as url:
        await asyncio.to_thread(work, url)
