"""Time `VllmEngine` against vLLM's own offline `LLM`: the cost of our layer. A tiny model on a CPU, alternating rounds.

    VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 python bench/vllm_engine.py

Both sample the same number of ids with logprobs from the same model, and neither makes text. A small model is the hard
case: the cheaper a step, the larger the share of the work around it.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from unbroken.engines.vllm import VllmEngine, parse_engine_args
from unbroken.types import SampleRequest, SamplingParams, token_ids

NUM_PROMPTS = 64
MAX_TOKENS = 64
ROUNDS = 7
OPTIONS = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 256, "block_size": 32}


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(folder)
        flags = [text for name, value in OPTIONS.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        fixed = ["--model", folder, "--skip-tokenizer-init", "--enforce-eager"]
        ours = await VllmEngine.start(parse_engine_args([*fixed, *flags]))
        offline = await asyncio.to_thread(start_offline, folder)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 512, 32).tolist() for _ in range(NUM_PROMPTS)]
        print(
            "| 64 tokens each, one logprob per id | offline LLM, ids/s | VllmEngine, ids/s | ratio |\n|---|---|---|---|"
        )
        for n in (4, 1):
            await compare(
                f"{NUM_PROMPTS} prompts x n={n}",
                partial(asyncio.to_thread, generate, offline, prompts, n),
                partial(sample, ours, prompts, n),
                num_ids=NUM_PROMPTS * n * MAX_TOKENS,
            )
        await ours.close()


async def compare(
    name: str, reference: Callable[[], Awaitable[None]], subject: Callable[[], Awaitable[None]], *, num_ids: int
) -> None:
    """Print the medians of alternating rounds, and the median of the rounds' ratios."""
    await reference()
    await subject()
    times = [(await timed(reference), await timed(subject)) for _ in range(ROUNDS)]
    rates = [statistics.median(num_ids / column for column in columns) for columns in zip(*times, strict=True)]
    ratio = statistics.median(ref / sub for ref, sub in times)
    print(f"| {name} | {rates[0]:.0f} | {rates[1]:.0f} | {ratio:.2f} |")


async def timed(work: Callable[[], Awaitable[None]]) -> float:
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


async def sample(engine: VllmEngine, prompts: list[list[int]], n: int) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS)
    requests = [
        SampleRequest(request_id=str(number), prompt_ids=token_ids(ids), n=n, params=params)
        for number, ids in enumerate(prompts)
    ]
    results = await asyncio.gather(*(engine.sample(request) for request in requests))
    assert sum(len(s.completion_ids) for r in results for s in r.sequences) == len(prompts) * n * MAX_TOKENS


def start_offline(folder: str) -> Any:
    from vllm import LLM

    return LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        **OPTIONS,
    )


def generate(llm: Any, prompts: list[list[int]], n: int) -> None:
    import vllm

    params = vllm.SamplingParams(
        n=n, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert sum(len(c.token_ids) for output in outputs for c in output.outputs) == len(prompts) * n * MAX_TOKENS


def save_tiny_model(folder: str) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    asyncio.run(main())
