"""`create_app`: the server as an ASGI application, over any engine and any renderer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from unbroken import __version__
from unbroken.engines.base import Engine
from unbroken.errors import UnbrokenError
from unbroken.images.decoder import DecodingBudget, ImageLimits
from unbroken.images.loader import ImageLoader
from unbroken.images.processor import ImageInputs, ImageProcessor
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.server.config import ServerConfig, ServerLimits
from unbroken.server.context import MakeRenderer, ServerContext
from unbroken.server.http.access import DESCRIPTION, Routes
from unbroken.server.http.errors import HttpError, error_response
from unbroken.server.http.guard import Guard
from unbroken.server.images import ImageFetcher, ImageIntake, ImageStore
from unbroken.server.metrics import Metrics
from unbroken.server.policies import PolicySource
from unbroken.server.questions import PlainTurns
from unbroken.server.routes import list_access, load_routers
from unbroken.server.service import SamplingService
from unbroken.server.turns import TurnOpener
from unbroken.server.weights import WeightLoader

_ERROR_KINDS = (
    HttpError, UnbrokenError, RequestValidationError, ValidationError, HTTPException, TimeoutError, RecursionError,
    Exception,
)  # fmt: skip


def create_app(
    engine: Engine,
    make_renderer: MakeRenderer,
    codec: TextCodec,
    config: ServerConfig,
    *,
    image_processor: ImageProcessor | None = None,
    image_limits: ImageLimits | None = None,
    no_images_because: str = "its model takes text only",
    make_turns: Callable[[ServerContext], TurnOpener] = PlainTurns,
    policy_source: PolicySource | None = None,
    more_routers: Sequence[Routes] = (),
) -> FastAPI:
    """Make the server's application. It does not close the engine.

    `codec` has the renderers' tokenizer, and the renderers also use `image_processor`, which keeps to `image_limits`;
    without a processor, images are refused, and errors give the reason `no_images_because`. `make_turns` makes what
    answers the dialects' questions, by default without sessions; `policy_source` has policies that requests may name
    besides the engine's; `more_routers` come before those of the dialects.
    """
    metrics = Metrics()
    context = ServerContext(
        service=SamplingService(engine, limits=config.limits, metrics=metrics),
        make_renderer=make_renderer,
        codec=codec,
        images=_make_intake(
            engine, config, image_processor, image_limits or make_image_limits(config.limits), no_images_because
        ),
        weights=WeightLoader(engine, config.weights_dir, config.versions_from),
        config=config,
        metrics=metrics,
        make_turns=make_turns,
        policy_source=policy_source,
    )
    app = FastAPI(
        title="unbroken", version=__version__, description=DESCRIPTION, lifespan=_lifespan, redirect_slashes=False
    )
    app.state.context = context
    routers = [*more_routers, *load_routers()]
    # `include_router` would make each route anew.
    app.router.routes.extend(route for router in routers for route in router.routes)
    for kind in _ERROR_KINDS:
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(Guard, config=config, metrics=metrics, access=list_access(routers))
    return app


def make_image_limits(limits: ServerLimits) -> ImageLimits:
    """The limits of images, for all that decode them in one server."""
    return ImageLimits(
        max_bytes=limits.max_image_bytes,
        max_pixels=limits.max_image_pixels,
        budget=DecodingBudget(limits.image_memory_mib * 2**20),
    )


def _make_intake(
    engine: Engine,
    config: ServerConfig,
    processor: ImageProcessor | None,
    image_limits: ImageLimits,
    no_images_because: str,
) -> ImageIntake:
    limits = config.limits
    store = ImageStore(limits.image_cache_mib * 2**20)
    if processor is not None and not engine.takes_images:
        processor, no_images_because = None, f"its engine ({type(engine).__name__}) takes text only"
    if processor is None:
        return ImageIntake(
            None,
            store,
            max_images=limits.max_images,
            context_length=engine.context_length,
            no_images_because=no_images_because,
        )
    loader = ImageLoader(
        limits=image_limits,
        files=False,
        find_stored=store.get,
        fetch=ImageFetcher(hosts=config.image_hosts, max_bytes=limits.max_image_bytes) if config.image_hosts else None,
    )
    return ImageIntake(
        ImageInputs(processor=processor, loader=loader),
        store,
        max_images=limits.max_images,
        context_length=engine.context_length,
    )


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    context: ServerContext = app.state.context
    async with context.weights.following():
        yield
    await context.close()


async def _answer_error(request: Request, error: Exception) -> Response:
    """Exception handler of the application."""
    return error_response(error, path=request.scope["path"])
