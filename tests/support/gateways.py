"""A gateway over a scripted engine, and an agent that talks to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from support.servers import asgi_client, encode, scripted_engine, server_tokenizer
from unbroken.engines.base import Engine
from unbroken.engines.scripted import ScriptedReply
from unbroken.gateway.app import create_gateway
from unbroken.gateway.config import GatewayConfig
from unbroken.gateway.sessions import Sessions
from unbroken.ledger.store import open_store
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.template import TemplateRenderer
from unbroken.server.config import ServerConfig
from unbroken.types import token_ids

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "What is in cell 4?"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"cell": {"type": "integer"}}}},
    }
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"cell": 4}}\n</tool_call><|im_end|>'


def replies(*texts: str, queue_s: float | None = None) -> Callable[[Any], ScriptedReply]:
    """A script of texts in the order of the requests; the last one again and again."""
    left = list(texts)

    def reply(_: Any) -> ScriptedReply:
        ids = encode(left.pop(0) if len(left) > 1 else left[0])
        return ScriptedReply(completion_ids=token_ids(ids), queue_s=queue_s)

    return reply


def scripted(*texts: str, queue_s: float | None = None) -> Any:
    """A scripted engine that answers with these texts."""
    return scripted_engine(replies(*texts, queue_s=queue_s))


@dataclass
class Gateway:
    """A running gateway and a client with its key."""

    app: Any
    client: httpx.AsyncClient
    agents: list[httpx.AsyncClient] = field(default_factory=list)

    async def create(self, **settings: Any) -> dict[str, Any]:
        answer = await self.client.post("/v1/sessions", json=settings)
        assert answer.status_code == 200, answer.text
        created: dict[str, Any] = answer.json()
        return created

    def agent(self, created: dict[str, Any]) -> httpx.AsyncClient:
        """A client that knows only the session's key."""
        agent = asgi_client(self.app, Authorization=f"Bearer {created['api_key']}")
        self.agents.append(agent)
        return agent

    async def look(self, created: dict[str, Any], path: str = "") -> dict[str, Any]:
        answer = await self.client.get(f"/v1/sessions/{created['session_id']}{path}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def make_gateway(
    engine: Engine, store: Path | str | Any, *, gateway: GatewayConfig | None = None, source: Any = None, **config: Any
) -> Any:
    """The application of a gateway over a store, or over the one in a folder or at a URL."""
    return create_gateway(
        engine,
        lambda options: TemplateRenderer(server_tokenizer(), template_kwargs=options),
        TextCodec(server_tokenizer()),
        ServerConfig(model_name="tiny", **config),
        store=open_store(str(store)) if isinstance(store, Path | str) else store,
        gateway=gateway,
        policy_source=source,
    )


@asynccontextmanager
async def running_gateway(
    engine: Engine, store: Path | str | Any, *, gateway: GatewayConfig | None = None, source: Any = None, **config: Any
) -> AsyncIterator[Gateway]:
    """Run a gateway over a store, or over the one in a folder or at a URL."""
    app = make_gateway(engine, store, gateway=gateway, source=source, **config)
    key = config.get("api_key")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with app.router.lifespan_context(app), asgi_client(app, **headers) as client:
        running = Gateway(app, client)
        try:
            yield running
        finally:
            for agent in running.agents:
                await agent.aclose()


async def ask(agent: httpx.AsyncClient, messages: Sequence[Any], **fields: Any) -> dict[str, Any]:
    """Ask for one turn and return its message."""
    answer = await agent.post(CHAT, json={"messages": list(messages), "tools": TOOLS, **fields})
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def result(message: dict[str, Any], content: str = "17") -> dict[str, Any]:
    """What the tool answers to the call of a message."""
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": content}


def error(answer: httpx.Response) -> tuple[int, str | None]:
    """Status and code of an answer that refuses."""
    assert answer.status_code >= 400, answer.text
    found = answer.json()["error"]
    assert found["message"]
    return answer.status_code, found["code"]


@asynccontextmanager
async def restarted(gateway: Gateway, store: Any) -> AsyncIterator[Gateway]:
    """A gateway as after a restart on a store: nothing is in memory. Its routes are `gateway`'s, which is faster."""
    context, before = gateway.app.state.context, gateway.app.state.sessions
    after = Sessions(context, store, GatewayConfig())
    gateway.app.state.sessions = context.turns.sessions = after
    try:
        yield gateway
    finally:
        gateway.app.state.sessions = context.turns.sessions = before
        await after.close()
