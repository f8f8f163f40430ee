"""An engine that quantises the weights of a trainer in bfloat16: whether updates are exact, and k3 to the trainer.

    OMP_NUM_THREADS=4 HF_HUB_OFFLINE=1 python bench/fp8.py                           # one GPU
    ... python bench/fp8.py --kv-cache-dtype fp8                                     # the KV cache too
    export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
    OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 python bench/fp8.py                           # a CPU: tiny, not quantised

Of a random Qwen3 (0.6b; its ids are few). Served logprobs of weights that came through memory, through files and by a
fresh load have to be equal: it fails if they are not. k3 is that of the trainer's logprobs of sampled ids against the
engine's, without and with truncated importance weights; an engine that does not quantise has the least there can be.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_task import SHAPES
from unbroken.engines.vllm import VllmEngine, parse_engine_args
from unbroken.types import SampleRequest, SamplingParams, token_ids
from unbroken.weights.files import FileSource
from unbroken.weights.sources import TensorSource

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.models import random_qwen3  # type: ignore[import-not-found,import-untyped,unused-ignore]
from support.ranks import logprobs_of  # type: ignore[import-not-found,import-untyped,unused-ignore]
from support.served import save_tiny_model  # type: ignore[import-not-found,import-untyped,unused-ignore]
from support.servers import server_tokenizer  # type: ignore[import-not-found,import-untyped,unused-ignore]

ON_GPU = torch.cuda.is_available()
SIZES: dict[str, Any] = {
    **SHAPES["0.6b" if ON_GPU else "tiny"],
    "initializer_range": 0.04 if ON_GPU else 0.2,  # enough that weights matter
    "max_position_embeddings": 2048,
}
SIZES.pop("vocab_size")  # the tokenizer's
SEQUENCES = [np.random.default_rng(n).integers(3, 200, 40 + 7 * n).tolist() for n in range(16)]
NUM_PROMPT_IDS = 40
CAP = 2.0
"""Of importance weights."""
TOLERANCE = 1e-3
"""Of logprobs that have to be equal."""


async def start(folder: Path, quantization: str, kv_cache_dtype: str) -> VllmEngine:
    """Start an engine with a model's folder."""
    words = ["--model", str(folder), "--enforce-eager", "--max-model-len", "2048", "--kv-cache-dtype", kv_cache_dtype]
    if ON_GPU:
        words += ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.35"]
    else:
        words += ["--dtype", "float32", "--block-size", "32", "--num-gpu-blocks-override", "2048"]
    if quantization != "none":
        words += ["--quantization", quantization]
    started = time.perf_counter()
    engine = await VllmEngine.start(parse_engine_args(words))
    print(f"engine with quantization {quantization} started in {time.perf_counter() - started:.0f} s", flush=True)
    return engine


async def score(engine: VllmEngine) -> Any:
    """Logprobs of all sequences, one after another, so that steps have the same shapes each time."""
    return np.concatenate([(await engine.score(token_ids(ids))).logprobs for ids in SEQUENCES])


def check_equal(name: str, found: Any, expected: Any) -> bool:
    difference = np.abs(found - expected)
    is_equal = bool(difference.max() <= TOLERANCE)
    print(
        f"{'equal' if is_equal else 'NOT EQUAL'}: {name}: mean {difference.mean():.1e} max {difference.max():.1e} "
        f"of {len(difference)} logprobs",
        flush=True,
    )
    return is_equal


async def print_mismatch(name: str, engine: VllmEngine, trainer: Any) -> None:
    """Of ids that the engine samples."""
    results = await asyncio.gather(
        *(
            engine.sample(
                SampleRequest(
                    request_id=f"{name} {number}",
                    prompt_ids=token_ids(ids[:NUM_PROMPT_IDS]),
                    n=4,
                    params=SamplingParams(max_tokens=128 if ON_GPU else 64, seed=number),
                )
            )
            for number, ids in enumerate(SEQUENCES)
        )
    )
    differences, served = [], []
    for ids, result in zip(SEQUENCES, results, strict=True):
        for sequence in result.sequences:
            own = logprobs_of(trainer, [*ids[:NUM_PROMPT_IDS], *sequence.completion_ids.tolist()])
            differences.append(own[NUM_PROMPT_IDS - 1 :] - sequence.rollout_logprobs)
            served.append(sequence.rollout_logprobs)
    r = np.concatenate(differences).astype(np.float64)
    weights = np.minimum(np.exp(r), CAP)
    k3, left = (float(np.mean(np.expm1(x) - x)) for x in (r, r - np.log(weights)))
    ess = weights.sum() ** 2 / np.square(weights).sum() / len(r)
    print(
        f"{name}: k3 {k3:.2e}, with weights of at most {CAP:g} {left:.2e}; |difference| mean {np.abs(r).mean():.4f} "
        f"max {np.abs(r).max():.3f}; mean weight {weights.mean():.4f}, cut {np.mean(np.exp(r) > CAP):.2e}, "
        f"ESS {ess:.4f}; entropy about {-np.concatenate(served).mean():.2f} nats, {len(r)} ids",
        flush=True,
    )


async def measure(folder: Path, quantization: str, kv_cache_dtype: str) -> bool:
    """Whether all that has to be equal is."""
    old, new = folder / "old", folder / "new"
    save_tiny_model(old, **SIZES)
    tokenizer = server_tokenizer()
    tokenizer.save_pretrained(new)
    trainer = random_qwen3(seed=1, vocab_size=len(tokenizer), **SIZES).to(torch.bfloat16 if ON_GPU else torch.float32)
    trainer.save_pretrained(new)
    trainer = trainer.to("cuda" if ON_GPU else "cpu")
    engine = await start(old, quantization, kv_cache_dtype)
    before = await score(engine)
    started = time.perf_counter()
    await engine.update_weights(TensorSource(trainer.named_parameters()), policy_version=1)
    print(f"update through memory in {time.perf_counter() - started:.2f} s", flush=True)
    memory, again = await score(engine), await score(engine)
    await engine.update_weights(FileSource(old), policy_version=2)
    back = await score(engine)
    await engine.update_weights(FileSource(new), policy_version=3)
    files = await score(engine)
    print(f"logprobs of old and new weights are {np.abs(before - memory).mean():.3f} apart")
    are_equal = [
        check_equal("the same scores twice", again, memory),
        check_equal("new weights through files and through memory", files, memory),
        check_equal("old weights after the updates and before", back, before),
    ]
    await print_mismatch(f"quantization {quantization}", engine, trainer)
    difference = np.abs(files - np.concatenate([logprobs_of(trainer, ids) for ids in SEQUENCES]))
    print(f"scores against the trainer's: mean {difference.mean():.4f} max {difference.max():.3f}", flush=True)
    await engine.close()
    fresh = await start(new, quantization, kv_cache_dtype)
    are_equal.append(check_equal("new weights after the update and of a fresh load", files, await score(fresh)))
    await fresh.close()
    if quantization != "none":
        plain = await start(new, "none", "auto")
        await print_mismatch("quantization none", plain, trainer)
        await plain.close()
    return all(are_equal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", default="fp8" if ON_GPU else "none", help="vLLM's, or none")
    parser.add_argument("--kv-cache-dtype", default="auto")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not asyncio.run(measure(Path(folder), arguments.quantization, arguments.kv_cache_dtype)):
            raise SystemExit("some logprobs are not equal that have to be")


if __name__ == "__main__":
    main()
