"""Routing replay in a run: one setting of the trainer makes engines record experts, and requests ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.architectures import tiny_model
from unbroken.runs.config import EngineConfig, EngineKind
from unbroken.runs.engines import _serve_command, open_engine
from unbroken.runs.processes import Rank
from unbroken.types import SampleRequest, SamplingParams

ASKING = SamplingParams(max_tokens=3, return_routed_experts=True)


def open_embedded(output: Path, **options: Any) -> Any:
    return open_engine(
        EngineConfig(),
        model=tiny_model("qwen3_moe"),
        source="tiny",
        output=output,
        device=torch.device("cpu"),
        rank=Rank(),
        **options,
    )


async def test_the_embedded_engine_of_a_run_records_experts(tmp_path):
    async with open_embedded(tmp_path, records_routing=True) as found:
        result = await found.engine.sample(SampleRequest(request_id="a", prompt_ids=[1, 2], params=ASKING))
    (sequence,) = result.sequences
    assert sequence.routed_experts.shape == (4, 2, 2)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_server_that_the_run_starts_records_them_with_either_engine(engine):
    config = EngineConfig(kind=EngineKind.STARTED, serve_options=("--engine", engine))
    assert "--enable-return-routed-experts" in _serve_command(config, "m", Path("w"), records_routing=True)
    assert "--enable-return-routed-experts" not in _serve_command(config, "m", Path("w"))
