"""A training step with its layers compiled, and as they are: seconds, GiB, and what the GPU spends its time on.

    OMP_NUM_THREADS=1 python bench/compiled.py                                  # tiny model, CPU
    python bench/compiled.py --shape 0.6b --mixed-precision bf16                # one GPU

A Qwen3 with random weights; rows as those of bench/grpo.py: of one turn, of four, and with a long tail of lengths. The
first step compiles what is left to compile. `--kernels` adds a table of the GPU's kernels.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from accelerate import Accelerator

from packing import SHAPES, make_model, make_rows
from unbroken.training.config import OptimizerConfig, TrainerConfig
from unbroken.training.metrics.mismatch import mismatch
from unbroken.training.trainer import Trainer
from unbroken.types import NO_VERSION, Logprobs, TrainingSample

LONGEST = 2048
SMALL_STEPS = OptimizerConfig(learning_rate=1e-9)
"""So that all trainers have the same weights, and what they compute can be compared."""


def make_lengths(task: str, num_rows: int, rng: np.random.Generator) -> list[int]:
    """Ids of each row."""
    match task:
        case "single":
            return [int(length) for length in rng.integers(311, 313, num_rows)]
        case "tools":
            return [int(length) for length in rng.integers(1360, 1380, num_rows)]
        case _:
            return [int(length) for length in np.clip(rng.lognormal(np.log(300), 1, num_rows), 16, LONGEST)]


def step(trainer: Trainer, rows: Sequence[TrainingSample]) -> float:
    """Seconds of a step on these rows, as if the present weights had sampled them."""
    own = [
        replace(row, policy_versions=np.where(row.sampled_mask, trainer.policy_version, NO_VERSION).astype(np.int32))
        for row in rows
    ]
    return trainer.step(own).seconds


def show_kernels(trainer: Trainer, rows: Sequence[TrainingSample], num_shown: int) -> None:
    """Profile one step and print its kernels by their share of the GPU's time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(trainer, rows)
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profile.key_averages():
        times[event.key] += event.self_device_time_total
        counts[event.key] += event.count
    total = sum(times.values())
    print(f"    kernels: {total / 1e6:.3f} s of the GPU in {sum(counts.values())}")
    for name, us in times.most_common(num_shown):
        print(f"    {us / total:6.1%}  {us / 1e6:.3f} s  {counts[name]:>6}  {name[:110]}")


def measure(trainer: Trainer, rows: Sequence[TrainingSample], rounds: int) -> tuple[float, Logprobs, str]:
    """Median seconds of the steps after the first, the logprobs of some rows afterwards, and what to print."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    first, *seconds = (step(trainer, rows) for _ in range(rounds + 1))
    median, num_ids = statistics.median(seconds), sum(len(row.token_ids) for row in rows)
    gib = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else math.nan
    shown = f"{median:.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), first {first:.1f} s, "
    return median, np.concatenate(trainer.logprobs(rows[:16])), shown + f"{num_ids / median:,.0f} ids/s, {gib:.1f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--tasks", default="single,tools,tail")
    parser.add_argument("--rows", type=int, help="256 on a GPU, 8 on a CPU")
    parser.add_argument("--tokens-per-pass", type=int, nargs="+", default=[12_288])
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", type=int, default=0, help="how many of them are listed")
    arguments = parser.parse_args()
    accelerator = Accelerator(mixed_precision=arguments.mixed_precision)
    on_gpu = accelerator.device.type == "cuda"
    rng = np.random.default_rng(0)
    num_rows = arguments.rows or (256 if on_gpu else 8)
    tasks = {
        task: make_rows(make_lengths(task, num_rows, rng), SHAPES[arguments.shape]["vocab_size"], rng)
        for task in arguments.tasks.split(",")
    }
    found: dict[tuple[int, str], tuple[float, Logprobs]] = {}
    for is_compiled, size in itertools.product((False, True), arguments.tokens_per_pass):
        started = time.perf_counter()
        config = TrainerConfig(
            optimizer=SMALL_STEPS,
            tokens_per_micro_batch=size,
            gradient_checkpointing=arguments.gradient_checkpointing,
            compile=is_compiled,
        )
        trainer = Trainer(make_model(arguments.shape, LONGEST), config, accelerator=accelerator)
        made_s = time.perf_counter() - started
        print(
            f"\n{'compiled' if is_compiled else 'as it is'}, passes of {size} ids: made in {made_s:.1f} s", flush=True
        )
        for task, rows in tasks.items():
            seconds, logprobs, shown = measure(trainer, rows, arguments.rounds)
            before, expected = found.setdefault((size, task), (seconds, logprobs))
            known = np.isfinite(expected)
            k3 = mismatch(logprobs[known], expected[known]).k3
            print(f"{task:>8}: {shown}; {seconds / before:.2f} of as it is, k3 to it {k3:.1e}", flush=True)
            if arguments.kernels and on_gpu:
                show_kernels(trainer, rows, arguments.kernels)
        del trainer
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
