"""Reads vLLM's options with vLLM's own parser, and starts and ends its processes.

Only the options that exactness needs are set here: logprobs are those of the processed distribution, and the workers
get our extension.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoConfig
from vllm import envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logger import DEFAULT_LOGGING_CONFIG
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import ray_utils
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats

from unbroken.decoder_config import DecoderConfig
from unbroken.engines.vllm.causes import CauseHandler, read_cause
from unbroken.engines.vllm.numerics import make_exact
from unbroken.engines.vllm.scheduler import SCHEDULER, split_steps
from unbroken.engines.vllm.workers import EXTENSION
from unbroken.errors import EngineError, InvalidInputError
from unbroken.types import Numerics

MIN_POLICY_ADAPTERS = 2
"""Versions of the policy's adapter that an engine has room for: the one in use, and the next one."""
POLICY_ADAPTER = "policy version "
"""How vLLM's names of the policy's adapters begin."""
_MAX_GRAPH_IDS = 1024
_WHOLE_GRAPH_HEADS = (65, 128)
"""Sizes of attention heads with which one graph is right for mixed steps and for steps that only sample."""
_EXIT_S = 60.0
"""How long vLLM's processes may take to end by themselves; vLLM's default kills them after five seconds."""
_WAKE_S = 1.0
"""After this time they are woken, again and again; see `_wake`."""


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


def require_exactness(
    args: AsyncEngineArgs, *, num_adapters: int, numerics: Numerics = Numerics.FAST
) -> AsyncEngineArgs:
    """Set what exact logprobs, scores and weight updates need.

    With adapters, the host's memory has room for two versions, as many as an update needs, of as many adapters of the
    policy or of several as a step has slots for.

    vLLM 0.32 on a CPU applies the adapter in its last slot to rows that asked for none, when they share a step with
    rows that asked for one (slot -1 means none, and is read as the last). On CPUs, that slot is kept empty.

    If the prompts of one step exceed `max_num_batched_tokens`, so that the last is computed in part, a request with a
    seed ends vLLM 0.32 on a CPU: it rewinds its generator, which torch's CPU generators cannot do. On CPUs, prompts
    are computed whole (no chunked prefill) unless the options say otherwise.

    Raises:
        InvalidInputError: another worker extension is given, settings of images for the whole engine, or copies that
            this process does not control.
    """
    if args.mm_processor_kwargs:
        raise InvalidInputError(
            f"mm_processor_kwargs must be left out, got {args.mm_processor_kwargs}: renderer and trainer would not "
            "know them. Give them with requests, or in the model's preprocessor_config.json"
        )
    _check_all_copies_are_here(args)
    if args.worker_extension_cls not in ("", EXTENSION):
        raise InvalidInputError(
            f"worker_extension_cls must be left out, got {args.worker_extension_cls!r}: the engine needs its own "
            "extension, and vLLM takes only one"
        )
    args = replace(
        args,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=EXTENSION,
        scheduler_cls=args.scheduler_cls or SCHEDULER,
    )
    if numerics is Numerics.EXACT:
        args = make_exact(args)
    if args.enable_lora:
        kept = num_adapters + MIN_POLICY_ADAPTERS * args.max_loras
        args = replace(args, max_cpu_loras=max(args.max_cpu_loras or 0, args.max_loras, kept))
    if not current_platform.is_cpu():
        return args
    whole_prompts = args.enable_chunked_prefill is None and args.max_num_batched_tokens is None
    return replace(
        args,
        max_loras=max(args.max_loras, num_adapters + 1),
        enable_chunked_prefill=False if whole_prompts else args.enable_chunked_prefill,
    )


def use_whole_graphs(args: AsyncEngineArgs) -> AsyncEngineArgs:
    """Let steps that compute prompts beside sampling be whole CUDA graphs too, up to 1,024 ids.

    In rollouts of several turns every fourth step is one, which vLLM cuts at attention. Only on Hopper, whose attention
    (FlashAttention 3) allows it, for models with which it is right (`_are_whole_graphs_right`), and unless the options
    name other graphs: sampling takes 0.8 of the time (docs/lab-notes/engines.md).
    """
    chosen = args.compilation_config
    given = (
        args.cudagraph_capture_sizes, args.max_cudagraph_capture_size, chosen.cudagraph_mode,
        chosen.cudagraph_capture_sizes, chosen.max_cudagraph_capture_size,
    )  # fmt: skip
    if args.enforce_eager or any(each is not None for each in given):
        return args
    if not current_platform.is_device_capability_family(90) or not _are_whole_graphs_right(args):
        return args
    chosen = copy(chosen)
    chosen.cudagraph_mode, chosen.max_cudagraph_capture_size = CUDAGraphMode.FULL, _MAX_GRAPH_IDS
    return replace(args, compilation_config=chosen)


def _are_whole_graphs_right(args: AsyncEngineArgs) -> bool:
    """Whether a step that only samples may replay the graph of a mixed step, by the model's config.

    With `FULL`, vLLM 0.32 has one graph for both, captured with several queries for each sequence. FlashAttention 3
    takes a plan for a step from outside of the graph. For one query for each sequence it drops the causal mask, unless
    heads have 65 to 128 numbers (`mha_fwd_get_scheduler_metadata`), and a plan without it has one array fewer: the
    graph then reads the plan's arrays at wrong places, and a real model with heads of 64 sampled garbage (k3 above 1).
    Windows, compressed keys (MLA), quantised keys and layers without attention were not measured: they get vLLM's own
    graphs. `bench/head_layouts.py` is the measurement.
    """
    if args.kv_cache_dtype != "auto" or args.hf_overrides:
        return False
    own = {"revision": args.revision, "trust_remote_code": args.trust_remote_code}
    try:
        config = DecoderConfig(AutoConfig.from_pretrained(args.model, **own))
    except (OSError, ValueError):  # vLLM says what is wrong, or reads a config that transformers does not know
        return False
    # SmolLM3 has a window that it does not use.
    has_window = config.window is not None and config.get("use_sliding_window") is not False
    is_compressed = config.get("kv_lora_rank") is not None
    smallest, largest = _WHOLE_GRAPH_HEADS
    is_proven_size = smallest <= config.head_size <= largest
    return is_proven_size and config.layer_kinds <= {"full_attention"} and not has_window and not is_compressed


def _check_all_copies_are_here(args: AsyncEngineArgs) -> None:
    """Raise `InvalidInputError` if other processes have some of the data-parallel copies, which no update would reach.

    A copy that another machine starts without a server (`--headless`) is this process's.
    """
    for name in (
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        "data_parallel_multi_port_external_lb",
    ):
        value = getattr(args, name, None)  # None: an option that this vLLM does not have
        if value is not None and value is not False:  # 0 is a rank
            option = name.replace("_", "-")
            raise InvalidInputError(
                f"--{option} must be left out with --data-parallel-size {args.data_parallel_size}, got {value}: "
                "updates and pauses would reach this server's copies only. Start one server with all, or one for each, "
                "without --data-parallel-size"
            )


async def start_llm(args: AsyncEngineArgs, counter: SampledCounter) -> AsyncLLM:
    """Start vLLM's processes and load the model; `EngineError`, with vLLM's reason, if that fails.

    Sizes that the options leave out are those of vLLM's offline `LLM` (256 or 1,024 sequences in a step), because
    rollouts come in batches. The default of `AsyncLLM` is 128 on every machine.
    """
    loggers = None if args.disable_log_stats else [counter.make_logger]

    def start() -> AsyncLLM:
        with _compiling_for(args.device_ids), _naming_causes(args) as own:
            return AsyncLLM.from_engine_args(own, stat_loggers=loggers, usage_context=UsageContext.LLM_CLASS)

    starting = asyncio.create_task(asyncio.to_thread(start))
    try:
        llm = await asyncio.shield(starting)
    except asyncio.CancelledError:
        with suppress(Exception):
            await shut_down(await starting)  # its processes would outlive this one
        raise
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"vLLM does not start: {type(error).__name__}: {error}") from error
    split_steps(llm)
    # `Calls.wait` watches this task, which ends with the engine; vLLM itself starts it with the first request.
    llm._run_output_handler()
    return llm


@contextmanager
def _naming_causes(args: AsyncEngineArgs) -> Iterator[AsyncEngineArgs]:
    """Yield arguments with which `EngineError` names the exception of a process that fails to start in the block."""
    with TemporaryDirectory(prefix="unbroken-vllm-") as folder:
        causes = Path(folder) / "causes.jsonl"
        try:
            yield log_causes(args, causes, settings=Path(folder) / "logging.json")
        except Exception as error:
            if (cause := read_cause(causes)) is None:
                raise
            raise EngineError(f"vLLM does not start: {cause}") from error


def log_causes(args: AsyncEngineArgs, causes: Path, *, settings: Path) -> AsyncEngineArgs:
    """Let vLLM's processes log as they do, and write exceptions into the file `causes` too.

    `settings` is the file in which they find how. Logging that the options or the environment set up stays as it is,
    as does that of workers which Ray may start on machines without these files.
    """
    chosen = args.create_logging_config()
    has_own = chosen.pylogging_config_file is not None or chosen.formatter != "text" or not chosen.configure_logging
    if has_own or not _are_workers_here(args):
        return args
    config = deepcopy(DEFAULT_LOGGING_CONFIG)
    own = {"()": f"{CauseHandler.__module__}.{CauseHandler.__qualname__}", "path": str(causes)}
    config["handlers"]["unbroken"] = own
    config["handlers"]["vllm"]["level"] = chosen.log_level
    config["loggers"]["vllm"] |= {"handlers": ["vllm", "unbroken"], "level": chosen.log_level}
    for formatter in config["formatters"].values():
        formatter["log_level"] = chosen.log_level
    settings.write_text(json.dumps(config))
    return replace(args, logging_config=replace(chosen, pylogging_config_file=str(settings)))


def _are_workers_here(args: AsyncEngineArgs) -> bool:
    """Whether all processes that are started for these arguments are on this machine: not so with Ray."""
    if args.distributed_executor_backend not in (None, "mp", "uni") or args.data_parallel_backend == "ray":
        return False
    # Without a choice, vLLM takes Ray in a process that Ray has started.
    return not (ray_utils.ray_is_available() and ray_utils.ray.is_initialized())


@contextmanager
def _compiling_for(device_ids: Sequence[int | str] | None) -> Iterator[None]:
    """Let vLLM's processes that the block starts keep what they compile in a folder for these GPUs.

    What vLLM 0.32 and 0.33 compile names the GPU by its number, and their cache does not: an engine on the second GPU
    would load what one on the first has compiled, and end with `CUDA driver error: invalid argument`.
    """
    if not device_ids or list(device_ids) == list(range(len(device_ids))):  # as without the option
        yield
        return
    name, before = "VLLM_CACHE_ROOT", os.environ.get("VLLM_CACHE_ROOT")
    os.environ[name] = str(Path(envs.VLLM_CACHE_ROOT) / ("devices-" + "-".join(map(str, device_ids))))
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


async def load_adapters(llm: AsyncLLM, adapters: Sequence[tuple[str, str]]) -> dict[str, LoRARequest]:
    """Load LoRA adapters, by name; `InvalidInputError` without `enable_lora`, or if one is named twice or broken."""
    requests: dict[str, LoRARequest] = {}
    for number, (name, path) in enumerate(adapters, start=1):
        if name in requests:
            raise InvalidInputError(f"adapter names must be unique, got {name!r} twice")
        requests[name] = await load_adapter(llm, name, path, number=number)
    return requests


async def load_adapter(llm: AsyncLLM, name: str, path: str, *, number: int) -> LoRARequest:
    """Load one adapter under a number that no other had; `InvalidInputError` as `load_adapters`.

    On a CPU, vLLM's last slot stays empty (`require_exactness`), so the numbers are limited.
    """
    config = llm.vllm_config.lora_config
    if config is None:
        raise InvalidInputError(f"adapters need enable_lora, got {name!r} without it")
    if current_platform.is_cpu() and number >= config.max_loras:
        raise InvalidInputError(
            f"vLLM on a CPU loads at most {config.max_loras - 1} adapters here, got another, {name!r}: start it with a "
            "higher --max-loras"
        )
    if name.startswith(POLICY_ADAPTER):
        raise InvalidInputError(f"adapter names must not begin with {POLICY_ADAPTER!r}, got {name!r}")
    if not (Path(path) / "adapter_config.json").is_file():
        raise InvalidInputError(f"adapter {name!r} must be a folder with an adapter_config.json, got {path!r}")
    request = LoRARequest(name, number, path)
    try:
        await llm.add_lora(request)
    except Exception as error:
        raise InvalidInputError(f"adapter {name!r} in {path!r} does not load: {error}") from error
    return request


async def shut_down(llm: AsyncLLM) -> None:
    """Stop vLLM's processes.

    The task that reads their outputs is cancelled first: it would take their end for a failure, with a traceback.
    """
    handler = llm.output_handler
    if handler is not None:
        handler.cancel()
        await asyncio.gather(handler, return_exceptions=True)
    llm.output_processor.propagate_error(EngineDeadError())  # for callers that still wait
    ending = asyncio.create_task(asyncio.to_thread(llm.shutdown, _EXIT_S))
    while not (await asyncio.wait([ending], timeout=_WAKE_S))[0]:
        await _wake(llm)
    await ending
    # Its destructor would shut down again, and fail at the interpreter's exit, when vLLM's modules are gone.
    llm.shutdown = _do_nothing
    # vLLM closes its sockets in the loop's next turn, but not their context.
    await asyncio.sleep(0)
    await asyncio.to_thread(llm.engine_core.resources.ctx.destroy)


async def _wake(llm: AsyncLLM) -> None:
    """Let vLLM's processes notice that they are to end.

    A signal that comes just before their main thread begins to wait for requests is noticed after the next request
    (Python runs the handlers of signals between two instructions, which that wait is not), so they get one.
    """
    with suppress(Exception):  # they may have ended by now
        for process in llm.engine_core.core_engines:
            await llm.engine_core._send_input(EngineCoreRequestType.ABORT, [], process)


def _do_nothing() -> None:
    pass


class SampledCounter:
    """Counts the ids that vLLM samples, from its statistics of each step."""

    def __init__(self) -> None:
        self.num_sampled = 0

    def make_logger(self, config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """Make the logger of one of vLLM's engine processes (data parallelism has several)."""
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
