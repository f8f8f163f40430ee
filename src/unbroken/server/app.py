"""`create_app`: the server as an ASGI application, over any engine and any renderer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from unbroken import __version__
from unbroken.engines.base import Engine
from unbroken.errors import UnbrokenError
from unbroken.rendering.codec import TextCodec
from unbroken.server.config import ServerConfig
from unbroken.server.context import MakeRenderer, ServerContext
from unbroken.server.guard import Guard
from unbroken.server.idempotency import Idempotency
from unbroken.server.metrics import Metrics
from unbroken.server.openapi import DESCRIPTION, PROBLEMS
from unbroken.server.problems import HttpError, answer_problem
from unbroken.server.routes import admin, chat, completions, native, operations, token_generate, tokenize, trl
from unbroken.server.service import SamplingService

_ROUTERS = (
    operations.router, native.router, token_generate.router, trl.router, completions.router, chat.router,
    tokenize.router, admin.router,
)  # fmt: skip
_PROBLEM_KINDS = (
    HttpError, UnbrokenError, RequestValidationError, ValidationError, HTTPException, TimeoutError, RecursionError,
    Exception,
)  # fmt: skip


def create_app(engine: Engine, make_renderer: MakeRenderer, codec: TextCodec, config: ServerConfig) -> FastAPI:
    """The server's application. It does not close the engine.

    Args:
        engine: what samples.
        make_renderer: template options to a renderer; see `MakeRenderer`.
        codec: the same tokenizer's plain encoding.
        config: name, keys and limits.
    """
    metrics = Metrics()
    context = ServerContext(
        service=SamplingService(engine, limits=config.limits, metrics=metrics),
        make_renderer=make_renderer,
        codec=codec,
        config=config,
        metrics=metrics,
    )
    app = FastAPI(title="unbroken", version=__version__, description=DESCRIPTION, lifespan=_lifespan)
    app.state.context = context
    for router in _ROUTERS:
        app.include_router(router, responses=PROBLEMS)
    for kind in _PROBLEM_KINDS:
        app.add_exception_handler(kind, answer_problem)
    # The one added last is the outermost.
    app.add_middleware(Idempotency, metrics=metrics)
    app.add_middleware(Guard, config=config, metrics=metrics)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    yield
    app.state.context.close()
