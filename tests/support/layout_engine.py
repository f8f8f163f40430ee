"""A process that samples from a model's folder by our vLLM engine with its default graphs, and compares: a JSON line.

PYTHONPATH=src:tests python -m support.layout_engine FOLDER
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from support.rollouts import play_turns
from unbroken.runs.policy_check import score_plainly
from unbroken.training.metrics.mismatch import Mismatch, mismatch_of_rows
from unbroken.types import SamplingParams

SMALL = ("--kv-cache-memory-bytes", str(1 << 30), "--gpu-memory-utilization", "0.05", "--max-num-seqs", "256")


async def sample_and_compare(folder: Path) -> Mismatch:
    """Conversations whose prompts come while others are sampled, against transformers in float32."""
    from unbroken.engines.vllm import VllmEngine, parse_engine_args

    words = ["--model", str(folder), "--dtype", "bfloat16", "--max-model-len", "2048", "--skip-tokenizer-init", *SMALL]
    engine = await VllmEngine.start(parse_engine_args(words))
    try:
        rows = await play_turns(engine, SamplingParams(max_tokens=48), longest_given=900, num_agents=64)
    finally:
        await engine.close()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to("cuda").eval()
    return mismatch_of_rows(rows, [each.logprobs for each in score_plainly(model, rows)])


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(sample_and_compare(Path(sys.argv[1]))))))
