"""A training step on one very long row: ids per second, and GiB on the GPU.

    OMP_NUM_THREADS=1 python bench/long_rows.py                            # tiny model, CPU: 1k and 4k ids
    python bench/long_rows.py --shape 0.6b --mixed-precision bf16          # one GPU: 32k and 128k ids
    torchrun --nproc-per-node 2 bench/long_rows.py --sequence 2 --shape 0.6b --mixed-precision bf16    # two share a row

A Qwen3 with random weights and gradient checkpointing; the second half of the row is sampled. The logits of
`logprob_chunk_size` ids are in memory at a time, whatever the row's length.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import replace

import numpy as np
import torch
from accelerate import Accelerator, PartialState

from packing import SHAPES, make_model, make_rows
from unbroken.training.config import ParallelConfig, TrainerConfig
from unbroken.training.trainer import Trainer
from unbroken.types import NO_VERSION


def measure(arguments: argparse.Namespace, length: int) -> tuple[float, float]:
    """Median seconds of the steps after the first, and GiB of PyTorch's at the peak, of this process."""
    accelerator = Accelerator(mixed_precision=arguments.mixed_precision, cpu=not torch.cuda.is_available())
    on_gpu = accelerator.device.type == "cuda"
    accelerator.print(f"{length} ids in a row", flush=True)
    parallel = ParallelConfig(sequence=arguments.sequence)
    config = TrainerConfig(gradient_checkpointing=True, tokens_per_micro_batch=length, parallel=parallel)
    trainer = Trainer(make_model(arguments.shape, length), config, accelerator=accelerator)
    (row,) = make_rows([length], SHAPES[arguments.shape]["vocab_size"], np.random.default_rng(0))
    seconds = []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for number in range(arguments.steps + 1):
        versions = np.where(row.sampled_mask, trainer.policy_version, NO_VERSION).astype(np.int32)
        step = trainer.step([replace(row, policy_versions=versions)])
        accelerator.print(f"  step {number}: {step.seconds:.2f} s, gradient norm {step.grad_norm:.4f}", flush=True)
        seconds.append(step.seconds)
    return statistics.median(seconds[1:]), torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[32_768, 131_072] if torch.cuda.is_available() else [1024, 4096]
    )
    parser.add_argument("--steps", type=int, default=1, help="measured, after one that warms up")
    parser.add_argument("--sequence", type=int, default=1, help="processes that share a row's ids, all of torchrun's")
    arguments = parser.parse_args()
    started = time.perf_counter()
    results = []
    for length in arguments.lengths:
        results.append((length, *measure(arguments, length)))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if not PartialState().is_main_process:
        return
    print(f"{'ids':>8}{'seconds':>10}{'ids/s':>10}{'GiB':>8}")
    for length, seconds, gib in results:
        print(f"{length:>8}{seconds:>10.2f}{length / seconds:>10,.0f}{gib:>8.1f}", flush=True)
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
