"""`unbroken serve`: starts an engine and a renderer and serves them until a signal."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

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
from unbroken.server.context import MakeRenderer
from unbroken.server.options import ServeOptions, name_option

_ANSWER_S = 5.0
"""Seconds to answer the requests that were not finished when the server stopped."""


def serve(options: ServeOptions) -> int:
    """Serve until SIGINT or SIGTERM, then give requests in flight `drain_s` to finish. Returns the exit status."""
    return asyncio.run(_serve(options))


async def _serve(options: ServeOptions) -> int:
    parent = os.getppid()
    codec = TextCodec(load_tokenizer(options.tokenizer or options.model))
    limits = options.config.limits
    image_limits = ImageLimits(max_bytes=limits.max_image_bytes, max_pixels=limits.max_image_pixels)
    processor, no_images_because = _load_image_processor(options.model, image_limits)
    make_renderer = _make_renderer_factory(options, processor, image_limits)
    try:
        make_renderer({})  # so that errors in the template and its options come before the engine starts
    except InvalidInputError as error:
        raise name_option(error) from None
    listener = _listen(options.host, options.port)
    engine = await _start_engine(options, codec, processor, image_limits)
    try:
        app = create_app(
            engine, make_renderer, codec, options.config, image_processor=processor, no_images_because=no_images_because
        )
        print(
            f"unbroken serves {options.config.model_name} at {_format_url(listener)} "
            f"({type(engine).__name__}, {engine.context_length} ids of context)",
            flush=True,
        )
        await _run_app(app, listener, options, parent)
    finally:
        await engine.close()
    return 0


def _make_renderer_factory(
    options: ServeOptions, processor: ImageProcessor | None, limits: ImageLimits
) -> MakeRenderer:
    images = None
    if processor is not None and not is_package_renderer(options.renderer):
        # The images of requests have been read by the time they reach a renderer: it opens no files.
        images = ImageInputs(processor=processor, loader=ImageLoader(limits=limits, files=False))
    return lambda template_kwargs: load_renderer(
        options.tokenizer or options.model,
        renderer=options.renderer,
        chat_template=options.chat_template,
        template_kwargs=template_kwargs,
        history=options.history,
        parser=options.parser,
        images=images,
    )


async def _run_app(app: FastAPI, listener: socket.socket, options: ServeOptions, parent: int) -> None:
    """Run the application until a signal, or until the parent process has ended if `exit_with_parent`."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        timeout_graceful_shutdown=options.drain_s,
        timeout_keep_alive=options.keep_alive_s,
        lifespan="on",
    )
    # Requests that are cancelled at the end are answered, and no failures.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not _is_cancelled(record))
    server = _Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
    watch = asyncio.create_task(wait_for_parent_exit(parent)) if options.exit_with_parent else None
    if watch is not None:
        watch.add_done_callback(lambda _: server.handle_exit(signal.SIGTERM, None))
    await server.serve(sockets=[listener])
    if server.server_state.tasks:  # cancelled, and being answered
        await asyncio.wait(server.server_state.tasks, timeout=_ANSWER_S)


def _is_cancelled(record: logging.LogRecord) -> bool:
    return record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)


async def wait_for_parent_exit(parent: int, *, every_s: float = 1.0) -> None:
    """Return once the parent process has ended."""
    while os.getppid() == parent:  # noqa: ASYNC110  # asyncio has no event for the end of a parent
        await asyncio.sleep(every_s)


def _load_image_processor(model: str, limits: ImageLimits) -> tuple[ImageProcessor | None, str]:
    """Load the model's image processor. Returns None and the reason if the model serves text only."""
    try:
        return load_image_processor(model, limits=limits), "its model takes text only"
    except InvalidInputError as error:
        print(f"unbroken: images will be refused: {error}", file=sys.stderr, flush=True)
        return None, str(error)


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn raises SIGTERM again at its end, which would end this process before the engine."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    """Open the port before the model is loaded, so that a port in use is an error at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With IPPROTO_TCP asyncio turns off Nagle's algorithm, which would delay each answer by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InvalidInputError(f"cannot listen on --host {host} --port {port}: {error}") from None
    return listener


def _format_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
    """Whether vLLM can be imported, dependencies included."""
    if importlib.util.find_spec("vllm") is None:
        return False
    try:
        from unbroken.engines.vllm import VllmEngine  # noqa: F401
    except ImportError:
        return False
    return True


async def _start_vllm(options: ServeOptions, image_limits: ImageLimits) -> Engine:
    try:
        from unbroken.engines.vllm import VllmEngine, parse_engine_args
    except ImportError as error:
        raise InvalidInputError(f"--engine vllm needs vLLM: pip install 'unbroken[vllm]' ({error})") from None
    words: Sequence[str] = options.engine_options
    if not any(word.startswith(("--max-logprobs", "--max_logprobs")) for word in words):
        # vLLM's default is 20; TRL's client asks for 100 when it scores.
        words = [*words, "--max-logprobs", str(options.config.limits.max_top_logprobs)]
    tokenizer = [] if options.tokenizer is None else ["--tokenizer", options.tokenizer]
    # The server has its own metrics, and vLLM's statistics take a fifth of this process's time.
    own = ["--model", options.model, *tokenizer, "--disable-log-stats"]
    lora = ["--enable-lora"] if options.adapters else []
    arguments = parse_engine_args([*own, *lora, *words])
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
