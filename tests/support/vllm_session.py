"""Fixtures of a whole test session: vLLM's environment, and its engines, which take 20 seconds each to start."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from unbroken.types import SampleRequest, SamplingParams, token_ids

# vLLM reads these when it is imported, and its processes inherit them.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else the workers of all engines share the first core
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SMALL_VLLM = (
    "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "2048",
)  # fmt: skip
"""Options of an engine on a tiny model. Without the last one its KV cache is a gigabyte at least, which is filled with
zeros."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """A `support.vllm_engines.Shared`: tests leave its engine running and unpaused, with whatever weights."""
    from support.vllm_engines import start_shared

    shared = await start_shared(tmp_path_factory.mktemp("vllm"))
    yield shared
    await shared.engine.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vision_vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """A `support.vision_engines.VisionEngine` on a tiny Qwen2.5-VL: tests leave it running and with its weights."""
    pytest.importorskip("torchvision", reason="needs torchvision")
    from support.vision_engines import start_vision_vllm

    started = await start_vision_vllm(tmp_path_factory.mktemp("vision"))
    yield started
    await started.engine.close()


async def greedy(engine: Any) -> list[int]:
    """Twenty ids that an engine finds the most likely after 1 2 3 4 5."""
    params = SamplingParams(temperature=0.0, max_tokens=20)
    request = SampleRequest(request_id="a", prompt_ids=token_ids([1, 2, 3, 4, 5]), params=params)
    return [*(await engine.sample(request)).sequences[0].completion_ids.tolist()]
