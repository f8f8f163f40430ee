"""A gateway's store with sessions of agents: tools, an edited reply, a sub-agent, an image, hostile text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.gateways import CALL, CHAT, USER, Gateway, ask, result, running_gateway, scripted
from support.image_servers import CAT, data_url, processor, tokenizer, user_message, vision_engine
from support.recorded import HOSTILE
from support.servers import asgi_client, server_tokenizer
from unbroken.gateway.app import create_gateway
from unbroken.images.loader import ImageLoader
from unbroken.images.processor import ImageInputs
from unbroken.ledger.store import open_store
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.template import TemplateRenderer
from unbroken.server.config import ServerConfig

SHOWN = HOSTILE.replace("\ud800", "?")
"""Hostile text as a client can send it."""
SUB_AGENT = [{"role": "system", "content": "You are the sub-agent."}, {"role": "user", "content": SHOWN}]


@asynccontextmanager
async def recording_gateway(store: Path) -> AsyncIterator[tuple[Gateway, Any]]:
    """A gateway whose first session has an agent that used a tool, edited a reply, and had a sub-agent."""
    engine = scripted(f"<think>\nwhere?\n</think>\n\nI look.{CALL}", "It is 17.<|im_end|>")
    async with running_gateway(engine, store) as gateway:
        created = await gateway.create(metadata={"task": SHOWN})
        agent = gateway.agent(created)
        message = await ask(agent, [USER])
        await ask(agent, [USER, message, result(message)])
        await ask(agent, [USER, {**message, "content": "I peek."}, result(message, "18")])
        await ask(agent, SUB_AGENT, tools=[])
        yield gateway, created


async def finish(gateway: Gateway, created: Any, **outcome: Any) -> None:
    """Finish a session."""
    answer = await gateway.client.post(f"/v1/sessions/{created['session_id']}/finish", json=outcome)
    assert answer.status_code == 200, answer.text


async def write_store(store: Path) -> list[str]:
    """A store of a gateway that has ended: the session above with a reward, and one that took no turn; their ids."""
    async with recording_gateway(store) as (gateway, created):
        await finish(gateway, created, reward=0.5, metrics={"exact": 0.5}, status="completed")
        empty = await gateway.create()
    return [created["session_id"], empty["session_id"]]


async def write_image_store(store: Path) -> str:
    """A store with one session, whose question has the image `CAT`; its id."""
    inputs = ImageInputs(processor=processor(), loader=ImageLoader(files=False))
    app = create_gateway(
        vision_engine(),
        lambda options: TemplateRenderer(tokenizer(), template_kwargs=options, images=inputs),
        TextCodec(tokenizer()),
        ServerConfig(model_name="tiny"),
        store=open_store(str(store)),
        image_processor=processor(),
    )
    async with app.router.lifespan_context(app), asgi_client(app) as client:
        created = (await client.post("/v1/sessions", json={})).json()
        async with asgi_client(app, Authorization=f"Bearer {created['api_key']}") as agent:
            body = {"messages": [user_message("what", data_url(CAT), "is it?")]}
            answer = await agent.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text
    session_id: str = created["session_id"]
    return session_id


def write_tokenizer(folder: Path) -> Path:
    """The tokenizer of these sessions' ids."""
    server_tokenizer().save_pretrained(folder)
    return folder
