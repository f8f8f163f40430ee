"""vLLM's processes as forks of one that has imported vLLM: an engine then starts in 5 seconds, not in 20.

On a CPU vLLM spawns its two processes, and each imports vLLM anew (10 CPU seconds). Importing this module has the fork
server, which imports it too, start the engine's process; that one forks its worker, as vLLM does on GPUs. A server that
is a fork itself forks its engine, unless it trains with others: a process with gloo's threads cannot be forked, and the
fork server does it. A server that a test starts as a command spawns its processes, as it does for a user.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import BaseContext, ForkContext

import torch.distributed
import vllm.v1.engine.core
import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker  # imported before the fork

from support.forks import fork_server


def _context() -> BaseContext:
    if torch.distributed.is_initialized():
        return multiprocessing.get_context("forkserver")
    return fork_server() if multiprocessing.parent_process() is None else _fork()


def _fork() -> ForkContext:
    return multiprocessing.get_context("fork")


vllm.v1.engine.utils.get_mp_context = _context  # type: ignore[assignment]
vllm.v1.executor.multiproc_executor.get_mp_context = _fork  # type: ignore[assignment]
