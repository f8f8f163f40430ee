"""Time weights from a trainer to vLLM on the same machine: through memory against files, in alternating rounds.

    OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 python bench/local_weights.py

One engine takes both ways in turns. An update lasts from the call until the engine samples with the new weights;
vLLM's own loading is the same in both. The files are in the system's temporary folder.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from unbroken.engines.vllm import VllmEngine, parse_engine_args
from unbroken.weights.sources import TensorSource

SIZES = {
    "vocab_size": 16_384, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1536, "max_position_embeddings": 512,
}  # fmt: skip
WAYS = ("files", "memory")


async def main(arguments: argparse.Namespace) -> None:
    """Start the engine, and time the updates."""
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = Qwen3ForCausalLM(config).to(arguments.device)
    num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        fixed = ["--model", folder, "--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "512"]
        engine = await VllmEngine.start(parse_engine_args([*fixed, "--dtype", arguments.dtype]))
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for round_number in range(arguments.rounds + 1):
            for way in WAYS:
                engine._deliveries.transfer_dir = Path(folder) if way == "files" else None
                started = time.perf_counter()
                source = TensorSource(model.named_parameters())
                await engine.update_weights(source, policy_version=engine.policy_version + 1)
                if round_number:  # the first one warms up
                    seconds[way].append(time.perf_counter() - started)
        await engine.close()
    print(f"{num_bytes / 2**20:.0f} MiB of float32 to an engine of {arguments.dtype}, {arguments.rounds} rounds")
    for way, found in seconds.items():
        print(f"through {way}: median {statistics.median(found):.3f} s, from {min(found):.3f} to {max(found):.3f} s")
    ratios = [files / memory for files, memory in zip(*seconds.values(), strict=True)]
    print(f"files / memory: {statistics.median(ratios):.1f} (median of the rounds' ratios)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    asyncio.run(main(parser.parse_args()))
