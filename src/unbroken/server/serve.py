"""`unbroken serve`: an engine, a renderer and the application, until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn

from unbroken.engines.base import Engine
from unbroken.errors import InvalidInputError
from unbroken.images.decoding import ImageLimits
from unbroken.images.inputs import ImageInputs
from unbroken.images.loading import ImageLoader
from unbroken.images.processing import ImageProcessor, load_image_processor
from unbroken.integrations.renderers.loading import is_package_renderer, load_renderer
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.loading import load_tokenizer
from unbroken.server.app import create_app
from unbroken.server.options import ServeOptions


def serve(options: ServeOptions) -> int:
    """Serve until SIGINT or SIGTERM; requests in flight then have `drain_s` to end. Returns the exit status."""
    return asyncio.run(_serve(options))


async def _serve(options: ServeOptions) -> int:
    parent = os.getppid()
    tokenizer = load_tokenizer(options.tokenizer or options.model)
    codec = TextCodec(tokenizer)

    limits = options.config.limits
    image_limits = ImageLimits(max_bytes=limits.max_image_bytes, max_pixels=limits.max_image_pixels)
    processor, no_images_because = _load_image_processor(options.model, image_limits)
    # Requests' images are read before anything is rendered: what reaches a renderer is a file.
    loader = ImageLoader(limits=image_limits, files=False)
    images = None if processor is None else ImageInputs(processor=processor, loader=loader)

    def make_renderer(template_kwargs: Any) -> Any:
        return load_renderer(
            options.tokenizer or options.model,
            renderer=options.renderer,
            chat_template=options.chat_template,
            template_kwargs=template_kwargs,
            images=None if is_package_renderer(options.renderer) else images,
        )

    make_renderer({})  # what is wrong with the template is known before the engine starts
    listener = _listen(options.host, options.port)
    engine = await _start_engine(options, codec, processor, image_limits)
    try:
        app = create_app(
            engine, make_renderer, codec, options.config, image_processor=processor, no_images_because=no_images_because
        )
        server = _Server(
            uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=options.drain_s, lifespan="on")
        )
        host, port = listener.getsockname()[:2]
        print(
            f"unbroken serves {options.config.model_name} at http://{host}:{port} "
            f"({type(engine).__name__}, {engine.context_length} ids of context)",
            flush=True,
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
        watch = asyncio.create_task(until_orphaned(parent)) if options.exit_with_parent else None
        if watch is not None:
            watch.add_done_callback(lambda _: server.handle_exit(signal.SIGTERM, None))
        await server.serve(sockets=[listener])
    finally:
        await engine.close()
    return 0


async def until_orphaned(parent: int, *, every_s: float = 1.0) -> None:
    """Return once this process is no child of `parent` any more, which was killed then."""
    while os.getppid() == parent:  # noqa: ASYNC110  # a parent's end is no event that asyncio knows
        await asyncio.sleep(every_s)


def _load_image_processor(model: str, limits: ImageLimits) -> tuple[ImageProcessor | None, str]:
    """The model's, or why images are refused: a model whose processor cannot be loaded serves text."""
    try:
        return load_image_processor(model, limits=limits), "its model is one of text"
    except InvalidInputError as error:
        print(f"unbroken: no images are taken: {error}", file=sys.stderr, flush=True)
        return None, str(error)


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn raises SIGTERM again when it is through, which would end us before the engine."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn: nothing is captured."""
        yield


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded: a port in use is an error at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without its protocol, asyncio would not turn off Nagle's algorithm, and each answer would take 40 ms longer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InvalidInputError(f"--host {host} --port {port} cannot be listened on: {error}") from None
    return listener


async def _start_engine(
    options: ServeOptions, codec: TextCodec, processor: ImageProcessor | None, image_limits: ImageLimits
) -> Engine:
    kind = options.engine
    if kind == "auto":
        kind = "vllm" if _has_vllm() else "transformers"
    if kind == "vllm":
        return await _start_vllm(options, image_limits)
    return await asyncio.to_thread(_load_transformers, options, codec, processor)


def _has_vllm() -> bool:
    """Whether vLLM can be imported: its folder alone, without what it needs, is not enough."""
    if importlib.util.find_spec("vllm") is None:
        return False
    try:
        import unbroken.engines.vllm  # noqa: F401
    except ImportError:
        return False
    return True


async def _start_vllm(options: ServeOptions, image_limits: ImageLimits) -> Engine:
    try:
        from unbroken.engines.vllm import VllmEngine, parse_engine_args
    except ImportError as error:
        raise InvalidInputError(f"--engine vllm needs vLLM: pip install 'unbroken[vllm]' ({error})") from None
    given: Sequence[str] = options.engine_options
    if not any(option.startswith(("--max-logprobs", "--max_logprobs")) for option in given):
        # vLLM's own cap is 20; TRL's client asks for 100 when it scores.
        given = [*given, "--max-logprobs", str(options.config.limits.max_top_logprobs)]
    tokenizer = [] if options.tokenizer is None else ["--tokenizer", options.tokenizer]
    # The server counts for itself, and vLLM's statistics take a fifth of this process's time.
    own = ["--model", options.model, *tokenizer, "--disable-log-stats"]
    lora = ["--enable-lora"] if options.adapters else []
    arguments = parse_engine_args([*own, *lora, *given])
    return await VllmEngine.start(arguments, adapters=options.adapters, image_limits=image_limits)


def _load_transformers(options: ServeOptions, codec: TextCodec, processor: ImageProcessor | None) -> Engine:
    if options.adapters:
        raise InvalidInputError(f"--adapter needs --engine vllm, got {dict(options.adapters)}")
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
    except ImportError as error:
        raise InvalidInputError(f"--engine transformers needs torch: pip install 'unbroken[train]' ({error})") from None
    parser = argparse.ArgumentParser(prog="unbroken serve --engine transformers", add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-batch", type=int, default=TransformersEngineConfig().max_batch)
    parser.add_argument("--context-length", "--max-model-len", type=int)
    arguments = parser.parse_args(list(options.engine_options))
    auto: Any = AutoModelForCausalLM if processor is None else AutoModelForImageTextToText
    model = auto.from_pretrained(options.model, dtype=arguments.dtype).to(arguments.device)
    return TransformersEngine(
        model,
        config=TransformersEngineConfig(max_batch=arguments.max_batch, context_length=arguments.context_length),
        decode=codec.decode,
        image_processor=processor,
    )
