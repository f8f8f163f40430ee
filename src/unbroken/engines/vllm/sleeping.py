"""vLLM's sleep mode: at level 2 weights and KV are dropped, and buffers wait in the CPU's memory.

vLLM 0.32 wakes in two parts, and resumes as soon as it has both. So it first gets the memory of the weights, which is
filled, and then that of the KV. An engine with LoRA sleeps at level 1, which keeps weights and adapters in the CPU's
memory: an adapter that wakes it does not bring the weights below it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from unbroken.errors import EngineError

_KEEP_WEIGHTS, _DISCARD_ALL = 1, 2
_WEIGHTS, _KV = "weights", "kv_cache"

Call = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Waits for vLLM, and raises our errors for its own."""


def check_can_sleep(llm: AsyncLLM) -> None:
    """Raise `EngineError` if vLLM cannot sleep. On a CPU it can, but drops nothing."""
    if not current_platform.is_sleep_mode_available():
        return
    if not llm.model_config.enable_sleep_mode:
        raise EngineError("vLLM can give its memory back only if it was started with --enable-sleep-mode")


async def fall_asleep(llm: AsyncLLM, call: Call) -> None:
    """Give back the memory of weights and KV."""
    level = _DISCARD_ALL if llm.vllm_config.lora_config is None else _KEEP_WEIGHTS
    await call(llm.sleep(level=level, mode="wait"))


async def wake_for_weights(llm: AsyncLLM, call: Call) -> None:
    """Allocate the memory of the weights, whose contents are undefined unless vLLM has LoRA."""
    _free_unused()
    await call(llm.wake_up(tags=[_WEIGHTS]))


async def wake_for_requests(llm: AsyncLLM, call: Call) -> None:
    """Allocate the memory of the KV, and resume; `EngineError` if vLLM still sleeps."""
    _free_unused()
    if not await call(llm.wake_up(tags=[_KV])):
        raise EngineError("vLLM did not wake")


def _free_unused() -> None:
    """Free GPU memory that torch in this process keeps unused: vLLM runs in other processes."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
