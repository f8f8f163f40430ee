"""The gateway of a run whose problems are attempted by agents."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from unbroken.engines.base import Engine
from unbroken.errors import missing_extra
from unbroken.images.processor import ImageInputs
from unbroken.rendering.base import Renderer
from unbroken.rollout.agents.runner import SessionGateway
from unbroken.runs.config import RunConfig, read_key
from unbroken.runs.models import load_model_renderer
from unbroken.runs.processes import Rank

_MAX_RETRIES = 12
"""A gateway that was killed may take a minute until it serves again."""


@asynccontextmanager
async def open_sessions(
    config: RunConfig,
    *,
    engine: Engine,
    model: str | Path,
    images: ImageInputs | None,
    rank: Rank,
) -> AsyncIterator[SessionGateway]:
    """Open the gateway at `sessions.url`, or one in this process over its engine, until the block ends.

    Raises:
        InvalidInputError: the gateway's packages are not installed, or the key cannot be read.
        StoreError: the store cannot be opened.
    """
    try:
        from unbroken.client import AsyncClient
        from unbroken.gateway.app import create_gateway
        from unbroken.ledger.store import open_store
        from unbroken.rendering.encoding.text_codec import TextCodec
        from unbroken.rendering.loader import load_tokenizer
        from unbroken.server.config import ServerConfig
        from unbroken.server.process import host_app
    except ModuleNotFoundError as error:
        raise missing_extra(error, "agents need the serve extra", "serve") from error
    sessions = config.sessions
    async with AsyncExitStack() as stack:
        if sessions.url is not None:
            key = read_key(sessions.api_key_file, field="sessions.api_key_file")
            client = await stack.enter_async_context(AsyncClient(sessions.url, api_key=key, max_retries=_MAX_RETRIES))
            yield client.sessions
            return

        def make_renderer(options: Mapping[str, Any]) -> Renderer:
            template_kwargs = {**config.renderer.template_kwargs, **options}
            renderer = replace(config.renderer, template_kwargs=template_kwargs)
            return load_model_renderer(model, renderer, config.rollouts.sampling, images=images)

        location = sessions.store or str(config.output / "sessions" / f"process-{rank.index}")
        key = secrets.token_urlsafe(24)
        app = create_gateway(
            engine,
            make_renderer,
            TextCodec(load_tokenizer(str(model))),
            ServerConfig(model_name="policy", api_key=key),
            store=open_store(location),
            image_processor=None if images is None else images.processor,
        )
        url = await stack.enter_async_context(host_app(app, host=sessions.host))
        client = await stack.enter_async_context(AsyncClient(url, api_key=key))
        yield client.sessions
