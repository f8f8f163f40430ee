"""vLLM's sleep mode at level 2: weights and keys are dropped, and only buffers wait in the CPU's memory.

vLLM 0.32 wakes in two parts, and goes on with its requests as soon as it has both: so the weights' memory comes first,
empty, is filled, and only then the keys' follows. Of its level 1, which brings the old weights back, nothing is used.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from unbroken.errors import EngineError

_DISCARD_ALL = 2
_WEIGHTS, _KEYS = "weights", "kv_cache"

Call = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Waits for vLLM, and raises our errors for its own."""


def check_can_sleep(llm: AsyncLLM) -> None:
    """Raise `EngineError` where a sleep would free nothing, or lose what was loaded at the start.

    On a CPU vLLM has no sleep mode: the engine goes through the same states, and nothing is dropped.
    """
    if not current_platform.is_sleep_mode_available():
        return
    if not llm.model_config.enable_sleep_mode:
        raise EngineError("vLLM gives its memory back only where it was started with --enable-sleep-mode")
    if llm.vllm_config.lora_config is not None:
        raise EngineError("vLLM with --enable-lora cannot sleep: it would wake with garbage for adapters")


async def fall_asleep(llm: AsyncLLM, call: Call) -> None:
    """Drop weights and keys."""
    await call(llm.sleep(level=_DISCARD_ALL, mode="wait"))


async def wake_for_weights(llm: AsyncLLM, call: Call) -> None:
    """Take the weights' memory back, which holds anything but weights."""
    _free_unused()
    await call(llm.wake_up(tags=[_WEIGHTS]))


async def wake_for_requests(llm: AsyncLLM, call: Call) -> None:
    """Take the keys' memory back and go on.

    Raises:
        EngineError: vLLM still sleeps.
    """
    _free_unused()
    if not await call(llm.wake_up(tags=[_KEYS])):
        raise EngineError("vLLM did not wake")


def _free_unused() -> None:
    """Give the GPU what the trainer's torch keeps of it without using it: vLLM is another process."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
