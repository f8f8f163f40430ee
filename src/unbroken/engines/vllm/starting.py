"""vLLM's own options, and the start and the end of its processes.

All of vLLM's engine options are read by its own parser. Set here are only those that exactness needs: logprobs are
those of the processed distribution, and the workers get our extension.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats

from unbroken.engines.vllm.weights.workers import EXTENSION
from unbroken.errors import EngineError, InvalidInputError

_EXIT_S = 60.0
"""How long vLLM's processes may take to end by themselves: some seconds each. It would kill them after five."""


def parse_engine_args(options: Sequence[str]) -> AsyncEngineArgs:
    """Read the engine options with vLLM's own parser.

    Raises:
        SystemExit: as argparse does, for options that vLLM does not know.
        InvalidInputError: vLLM refuses a value, or finds no such model.
    """
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="unbroken serve", add_help=False))
    namespace: argparse.Namespace = parser.parse_args(list(options))
    try:
        return AsyncEngineArgs.from_cli_args(namespace)
    except Exception as error:
        raise InvalidInputError(f"vLLM refuses its options: {type(error).__name__}: {error}") from error


def require_exactness(args: AsyncEngineArgs, *, num_adapters: int) -> AsyncEngineArgs:
    """`args` with what exact logprobs, scores and weight updates need.

    vLLM 0.32 on a CPU applies the adapter in its last slot to rows that asked for none, when they share a step with
    rows that asked for one (its slot -1 means none, and is read as the last). There, that slot is kept empty.

    And where prompts of one step exceed `max_num_batched_tokens`, so that the last is computed in part, a request with
    a seed ends vLLM 0.32 on a CPU: it winds back the generator of what it does not keep, which torch's generators on
    CPUs cannot do. There, prompts are computed whole (no chunked prefill) unless the options say otherwise.

    Raises:
        InvalidInputError: the place of our worker extension is taken, or images would be processed in another way than
            by the model's own settings and those of a request.
    """
    if args.mm_processor_kwargs:
        raise InvalidInputError(
            f"mm_processor_kwargs must be left out, got {args.mm_processor_kwargs}: renderer and trainer would not "
            "know of them. Give them with requests, or in the model's preprocessor_config.json"
        )
    if args.worker_extension_cls not in ("", EXTENSION):
        raise InvalidInputError(
            f"worker_extension_cls must be left out, got {args.worker_extension_cls!r}: the engine has an extension of "
            "its own there, and vLLM takes one"
        )
    args = replace(args, logprobs_mode="processed_logprobs", worker_extension_cls=EXTENSION)
    if not current_platform.is_cpu():
        return args
    whole_prompts = args.enable_chunked_prefill is None and args.max_num_batched_tokens is None
    return replace(
        args,
        max_loras=max(args.max_loras, num_adapters + 1),
        enable_chunked_prefill=False if whole_prompts else args.enable_chunked_prefill,
    )


async def start_llm(args: AsyncEngineArgs, counter: SampledCounter) -> AsyncLLM:
    """Start vLLM's processes and load the model.

    Where the options name no sizes, vLLM chooses them by use: those of its offline `LLM` (256 or 1,024 sequences in a
    step), because rollouts come in batches. Its choice for an `AsyncLLM` of unnamed use is 128 on every machine.

    Raises:
        EngineError: vLLM does not start; the message has its reason.
    """
    loggers = None if args.disable_log_stats else [counter.of_engine]
    try:
        llm = await asyncio.to_thread(
            AsyncLLM.from_engine_args, args, stat_loggers=loggers, usage_context=UsageContext.LLM_CLASS
        )
    except Exception as error:
        raise EngineError(f"vLLM does not start: {type(error).__name__}: {error}") from error
    # Its task ends when the engine does, which `VllmEngine` waits for; vLLM itself starts it with the first request.
    llm._run_output_handler()
    return llm


async def load_adapters(llm: AsyncLLM, adapters: Sequence[tuple[str, str]]) -> dict[str, LoRARequest]:
    """Load LoRA adapters, by name.

    Raises:
        InvalidInputError: `enable_lora` is off, a name came twice, or an adapter does not load.
    """
    if adapters and llm.vllm_config.lora_config is None:
        raise InvalidInputError(f"adapters need enable_lora, got {[name for name, _ in adapters]} without it")
    requests: dict[str, LoRARequest] = {}
    for number, (name, path) in enumerate(adapters, start=1):
        if name in requests:
            raise InvalidInputError(f"adapter names must be unique, got {name!r} twice")
        if not (Path(path) / "adapter_config.json").is_file():
            raise InvalidInputError(f"adapter {name!r} must be a folder with an adapter_config.json, got {path!r}")
        requests[name] = LoRARequest(name, number, path)
        try:
            await llm.add_lora(requests[name])
        except Exception as error:
            raise InvalidInputError(f"adapter {name!r} in {path!r} does not load: {error}") from error
    return requests


async def shut_down(llm: AsyncLLM) -> None:
    """Stop vLLM's processes.

    Its task that reads their outputs goes first: it would take their end for a failure, and say so with a traceback.
    """
    handler = llm.output_handler
    if handler is not None:
        handler.cancel()
        await asyncio.gather(handler, return_exceptions=True)
    llm.output_processor.propagate_error(EngineDeadError())  # whoever still waits
    await asyncio.to_thread(llm.shutdown, _EXIT_S)
    # Its destructor shuts down again, and fails at the interpreter's exit, where vLLM's modules are gone already.
    llm.shutdown = _nothing_more
    # It closes its sockets in this loop's next turn, and leaves their context open.
    await asyncio.sleep(0)
    await asyncio.to_thread(llm.engine_core.resources.ctx.destroy)


def _nothing_more() -> None:
    pass


class SampledCounter:
    """Counts the ids that vLLM samples, step by step, from its statistics."""

    def __init__(self) -> None:
        self.num_sampled = 0

    def of_engine(self, config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """A logger for one of vLLM's engine processes (there are several with data parallelism)."""
        return _CountingLogger(self, config, engine_index)


class _CountingLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM may not be installed where types are checked
    def __init__(self, counter: SampledCounter, config: VllmConfig, engine_index: int) -> None:
        self._counter = counter

    def record(
        self,
        scheduler_stats: object,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self._counter.num_sampled += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        pass
