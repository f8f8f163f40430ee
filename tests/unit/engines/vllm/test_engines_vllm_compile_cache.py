"""What vLLM compiles for one GPU is not loaded on another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unbroken.errors import EngineError


@pytest.mark.parametrize(
    ("device_ids", "folder"),
    [(None, ""), ([0], ""), ([0, 1], ""), ([1], "devices-1"), ([2, 3], "devices-2-3"), (["GPU-7"], "devices-GPU-7")],
)
@pytest.mark.parametrize("is_set", [True, False])
async def test_engines_on_other_gpus_have_a_compile_cache_of_their_own(
    device_ids, folder, is_set, tmp_path, monkeypatch
):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from unbroken.engines.vllm.startup import SampledCounter, start_llm

    root = str(tmp_path / "vllm")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("VLLM_CACHE_ROOT", root)
    if not is_set:
        monkeypatch.delenv("VLLM_CACHE_ROOT")
    before = os.environ.get("VLLM_CACHE_ROOT")
    seen = []

    def start(*arguments, **options):
        seen.append(os.environ.get("VLLM_CACHE_ROOT"))
        raise RuntimeError("enough seen")

    monkeypatch.setattr(AsyncLLM, "from_engine_args", start)
    args = AsyncEngineArgs(model=str(tmp_path), device_ids=device_ids)
    with pytest.raises(EngineError, match="enough seen"):
        await start_llm(args, SampledCounter())
    assert seen == [str(Path(root) / folder) if folder else before]
    assert os.environ.get("VLLM_CACHE_ROOT") == before
