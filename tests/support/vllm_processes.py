"""vLLM's processes as forks of one that has imported vLLM: an engine then starts in 5 seconds, not in 20.

On a CPU vLLM spawns its two processes, and each imports vLLM anew (10 CPU seconds). Importing this module has
`multiprocessing`'s fork server, which imports it too, start the engine's process; that one forks its worker, as
vLLM does on GPUs. The servers that end-to-end tests start as commands spawn theirs, as they do for a user.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkContext, ForkServerContext

import vllm.v1.engine.core
import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker  # imported before the fork


def _fork_server() -> ForkServerContext:
    return multiprocessing.get_context("forkserver")


def _fork() -> ForkContext:
    return multiprocessing.get_context("fork")


multiprocessing.set_forkserver_preload([__name__])
vllm.v1.engine.utils.get_mp_context = _fork_server  # type: ignore[assignment]
vllm.v1.executor.multiproc_executor.get_mp_context = _fork  # type: ignore[assignment]
