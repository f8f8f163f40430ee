"""Servers for tests: an application over a scripted or tiny engine, in this process or behind a real port."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn

from support import templates
from support.tokenizers import make_tokenizer
from unbroken.engines.base import Engine
from unbroken.engines.scripted import ScriptedEngine
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.template import TemplateRenderer
from unbroken.server.app import create_app
from unbroken.server.config import ServerConfig, ServerLimits
from unbroken.types import TokenIds

MODEL = "tiny"


@functools.cache
def server_tokenizer() -> Any:
    """The tokenizer of all these servers: Qwen's template with reasoning."""
    return make_tokenizer(templates.QWEN_THINKING, eos_token="<|im_end|>")


def encode(text: str) -> list[int]:
    """Ids of a text, control tokens included."""
    ids: list[int] = server_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return ids


def scripted_engine(reply: str | Callable[[TokenIds], Any], **options: Any) -> ScriptedEngine:
    """An engine that always says `reply` (a text, or a function of the prompt's ids)."""
    script = reply if callable(reply) else lambda prompt_ids: encode(reply)
    return ScriptedEngine(script, vocab_size=len(server_tokenizer()), **{"context_length": 4096, **options})


def make_app(engine: Engine, *, make: Callable[..., Any] = create_app, **config: Any) -> Any:
    """The application over an engine; `make` is another maker with the arguments of `create_app`."""
    return make(
        engine,
        lambda options: _renderer_with(json.dumps(options, sort_keys=True)),
        TextCodec(server_tokenizer()),
        ServerConfig(**{"model_name": MODEL, "limits": ServerLimits(), **config}),
    )


@functools.cache
def _renderer_with(options: str) -> TemplateRenderer:
    """Shared by all applications of the session, with its certificates."""
    return TemplateRenderer(server_tokenizer(), template_kwargs=json.loads(options))


def asgi_client(app: Any, **headers: str) -> httpx.AsyncClient:
    """A client that calls the application in this process."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """A value of `/metrics`."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


@asynccontextmanager
async def listening(app: Any, *, port: int = 0) -> AsyncIterator[str]:
    """Serve the application on a port of this machine, this one or any that is free; yields its base URL."""
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn tells by this alone
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


async def joined_stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The single choice of a streamed answer of OpenAI's dialects: texts and calls joined, the rest as it came."""
    joined: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        for choice in event["choices"]:
            delta = choice.pop("delta", {})
            joined["content"] += delta.get("content") or ""
            joined["reasoning_content"] += delta.get("reasoning_content") or ""
            joined["tool_calls"] += delta.get("tool_calls") or ()
            joined |= choice
    return joined


async def close_soon(engine: ScriptedEngine) -> None:
    """Close the engine while it samples."""
    await wait_for_ids(engine, 3)
    await engine.close()


async def wait_for_ids(engine: ScriptedEngine, number: int) -> None:
    """Wait until the engine has sampled this many ids."""
    while engine.num_sampled < number:  # noqa: ASYNC110  # engines announce no single ids
        await asyncio.sleep(0)
