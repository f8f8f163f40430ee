"""I9 with vLLM and our defaults on a GPU: head layouts of real models, and a real model, sample from their weights."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from support.rollouts import play_turns
from unbroken.runs.config import RunConfig
from unbroken.runs.numerics import open_pair
from unbroken.runs.policy_check import DENSE, check_against_folder, score_plainly
from unbroken.runs.settings import build, section_of
from unbroken.training.metrics.mismatch import check_one_policy
from unbroken.types import Numerics, SampleRequest, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from head_layouts import LAYOUTS, save_model

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

REAL = Path(os.environ.get("REAL_MODEL", Path(__file__).resolve().parents[2] / ".venv" / "real-model"))
"""The folder that tools/real_model.py makes."""
SMALL = ("--kv-cache-memory-bytes", str(1 << 30), "--gpu-memory-utilization", "0.05", "--max-num-seqs", "256")


async def sample_by_default(folder: Path) -> list[Any]:
    """Rows of conversations, whose prompts come while others are sampled, by an engine without any option of graphs."""
    from unbroken.engines.vllm import VllmEngine, parse_engine_args

    words = ["--model", str(folder), "--dtype", "bfloat16", "--max-model-len", "2048", "--skip-tokenizer-init", *SMALL]
    engine = await VllmEngine.start(parse_engine_args(words))
    try:
        return await play_turns(engine, SamplingParams(max_tokens=48), longest_given=900, num_agents=64)
    finally:
        await engine.close()


async def test_i9_each_layout_of_heads_samples_from_its_own_weights(tmp_path: Path):
    """All engines start at once: each takes a minute."""
    folders = {layout: tmp_path / layout.replace("/", "-") for layout in LAYOUTS}
    for layout, folder in folders.items():
        save_model(layout, folder)
    sampled = await asyncio.gather(*(sample_by_default(folder) for folder in folders.values()))
    for (layout, folder), rows in zip(folders.items(), sampled, strict=True):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to("cuda").eval()
        logprobs = [each.logprobs[row.loss_mask] for row, each in zip(rows, score_plainly(model, rows), strict=True)]
        found = check_one_policy(rows, logprobs, policy_version=0, max_k3=DENSE)
        print(f"{layout}: {found}")
        assert found is not None
        assert found.num_tokens > 2000, layout


@pytest.mark.skipif(not (REAL / "config.json").is_file(), reason="tools/real_model.py has made no model")
@pytest.mark.parametrize("numerics", Numerics)
async def test_i9_a_real_model_speaks_and_is_scored_alike(numerics, tmp_path: Path):
    from unbroken.integrations.renderers.registry import load_renderer

    options = ("--dtype", "bfloat16", "--max-model-len", "2048", "--gpu-memory-utilization", "0.3")
    config = build(
        section_of(RunConfig),
        {
            "output": tmp_path,
            "loop.num_steps": 1,
            "precision": "bfloat16",
            "engine.kind": "colocated",
            "engine.vllm_options": options,
            "trainer.numerics": numerics,
            "trainer.optimizer.learning_rate": 1e-5,
        },
    )
    renderer = load_renderer(str(REAL))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    async with open_pair(config, str(REAL)) as (opened, trainer):
        prompt = renderer.render(question).token_ids
        params = SamplingParams(max_tokens=16, temperature=0.0, stop_token_ids=renderer.get_stop_token_ids())
        result = await opened.engine.sample(SampleRequest(request_id="france", prompt_ids=prompt, params=params))
        reply = renderer.parse_response(result.sequences[0].completion_ids, prompt_ids=prompt, tools=[])
        assert "Paris" in reply.content
        print(await check_against_folder(opened.engine, REAL, renderer))
        rows = await play_turns(opened.engine, SamplingParams(max_tokens=48), longest_given=900, num_agents=64)
        logprobs = [each[row.loss_mask] for row, each in zip(rows, trainer.logprobs(rows), strict=True)]
        found = check_one_policy(rows, logprobs, policy_version=0, max_k3=DENSE)
    print(f"{numerics}: {found}")
    assert found is not None
    if numerics is Numerics.EXACT:
        assert found.max_abs == 0.0
