"""vLLM's processes as forks of one that has imported vLLM: an engine then starts in 5 seconds, not in 20.

On a CPU vLLM spawns its two processes, and each imports vLLM anew (10 CPU seconds). Importing this module has the fork
server, which imports it too, start the engine's process; that one forks its worker, as vLLM does on GPUs. A server that
is a fork itself forks its engine, unless it trains with others: a process with gloo's threads cannot be forked, and the
fork server does it. A server that a test starts as a command spawns its processes, as it does for a user.

Two more things take less time than in a command. The engine's process and its worker pause while they wait for each
other, where vLLM's try again at once for a second after each message, each on a core of its own. And what counts the
tokens that are likelier than the sampled one is not compiled, which takes each engine two seconds at its first token.
"""

from __future__ import annotations

import inspect
import multiprocessing
import time
from multiprocessing.context import BaseContext, ForkContext

import torch.distributed
import vllm.model_executor.layers.quantization.online.base
import vllm.v1.engine.coordinator
import vllm.v1.engine.core
import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor
import vllm.v1.sample.sampler
import vllm.v1.worker.cpu_worker
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from support.forks import fork_server

_wait_of_vllm = SpinCondition.wait
_PAUSE_S = 0.0005


def _context() -> BaseContext:
    if torch.distributed.is_initialized():
        return multiprocessing.get_context("forkserver")
    return fork_server() if multiprocessing.parent_process() is None else _fork()


def _fork() -> ForkContext:
    return multiprocessing.get_context("fork")


def _wait(condition: SpinCondition, timeout_ms: int | None = None) -> None:
    if time.monotonic() <= condition.last_read + condition.busy_loop_s:
        time.sleep(_PAUSE_S)
    else:
        _wait_of_vllm(condition, timeout_ms)


vllm.v1.engine.utils.get_mp_context = _context  # type: ignore[assignment]
vllm.v1.engine.coordinator.get_mp_context = _context  # type: ignore[assignment]
vllm.v1.executor.multiproc_executor.get_mp_context = _fork  # type: ignore[assignment]
SpinCondition.wait = _wait  # type: ignore[method-assign]
vllm.v1.sample.sampler.batched_count_greater_than = inspect.unwrap(vllm.v1.sample.sampler.batched_count_greater_than)
