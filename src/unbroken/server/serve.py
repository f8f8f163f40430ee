"""`unbroken serve`: starts an engine and a renderer and serves them until a signal."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
from collections.abc import Sequence
from typing import Any

from unbroken.engines.base import Engine
from unbroken.errors import InvalidInputError, missing_extra
from unbroken.images.decoder import ImageLimits
from unbroken.images.processor import ImageProcessor
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.server.app import create_app
from unbroken.server.options import ServeOptions
from unbroken.server.process import MakeApp, run_server


def serve(options: ServeOptions, *, make_app: MakeApp = create_app, note: str = "") -> int:
    """Serve until SIGINT or SIGTERM, then give requests in flight `drain_s` to finish. Returns the exit status.

    `make_app` makes the application, by default one without sessions; `note` is printed when it serves.
    """

    async def start(codec: TextCodec, processor: ImageProcessor | None, limits: ImageLimits) -> Engine:
        return await _start_engine(options, codec, processor, limits)

    return asyncio.run(
        run_server(
            options,
            model=options.model,
            tokenizer=options.tokenizer or options.model,
            start_engine=start,
            make_app=make_app,
            note=note,
        )
    )


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
        raise missing_extra(error, "--engine vllm needs vLLM", "vllm") from error
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
        raise missing_extra(error, "--engine transformers needs torch", "train") from error
    parser = argparse.ArgumentParser(prog="unbroken serve --engine transformers", add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-batch", type=int, default=TransformersEngineConfig().max_batch)
    parser.add_argument("--context-length", "--max-model-len", type=int)
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    arguments = parser.parse_args(list(options.engine_options))
    auto: Any = AutoModelForCausalLM if processor is None else AutoModelForImageTextToText
    model = auto.from_pretrained(options.model, dtype=arguments.dtype).to(arguments.device)
    return TransformersEngine(
        model,
        config=TransformersEngineConfig(
            max_batch=arguments.max_batch,
            context_length=arguments.context_length,
            records_routing=arguments.enable_return_routed_experts,
        ),
        decode=codec.decode,
        image_processor=processor,
    )
