"""Row ids per second of a training step: padded, packed in lanes, and packed in one lane per pass.

    OMP_NUM_THREADS=1 python bench/packing.py
    python bench/packing.py --shape 0.6b --mixed-precision bf16 --tf32 --longest 4096      on a GPU

A Qwen3 with random weights, and rows with a long tail of lengths, as trajectories have. Rounds alternate. Padding is
not counted. Loss and gradient are the same in all three (`tests/unit/training/model/test_training_packing.py`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM

from unbroken.training.config import Packing, TrainerConfig
from unbroken.training.metrics.stats import StepStats
from unbroken.training.trainer import Trainer
from unbroken.types import NO_VERSION, TrainingSample

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 32, "intermediate_size": 384, "vocab_size": 2048},
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151_936},
}  # fmt: skip


def make_rows(lengths: Sequence[int], vocab_size: int, rng: np.random.Generator) -> list[TrainingSample]:
    """Rows of random ids, whose second half is sampled."""
    rows = []
    for length in lengths:
        mask = np.arange(length) >= max(1, length // 2)
        rows.append(
            TrainingSample(
                token_ids=rng.integers(vocab_size, size=length).astype(np.int32),
                sampled_mask=mask,
                loss_mask=mask,
                rollout_logprobs=np.where(mask, -np.log(vocab_size), np.nan).astype(np.float32),
                policy_versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
                advantages=np.where(mask, rng.choice([-1.0, 1.0]), 0.0).astype(np.float32),
            )
        )
    return rows


def make_model(shape: str, longest: int) -> Any:
    """A model with random float32 weights and tied embeddings."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPES[shape], max_position_embeddings=longest, tie_word_embeddings=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--tf32", action="store_true", help="compute float32 products (the output embeddings) in TF32")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--median", type=int, default=300)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--tokens-per-pass", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.tf32:
        torch.set_float32_matmul_precision("high")
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(arguments.median), 1, arguments.rows), 16, arguments.longest).astype(int)
    rows = make_rows(lengths.tolist(), SHAPES[arguments.shape]["vocab_size"], rng)
    accelerator = Accelerator(mixed_precision=arguments.mixed_precision)
    print(f"{len(rows)} rows, {lengths.sum()} ids, {lengths.min()} to {lengths.max()}, on {accelerator.device}")
    print("packing     padding   seconds   row ids/s   times  GiB of a step")
    trainers = {
        packing: Trainer(
            make_model(arguments.shape, arguments.longest),
            TrainerConfig(
                packing=packing,
                tokens_per_micro_batch=arguments.tokens_per_pass,
                gradient_checkpointing=arguments.gradient_checkpointing,
            ),
            accelerator=accelerator,
        )
        for packing in (Packing.NEVER, Packing.AUTO, Packing.ONE_LANE)
    }
    taken: dict[Packing, list[StepStats]] = {packing: [] for packing in trainers}
    peaks = dict.fromkeys(trainers, 0)
    on_gpu = accelerator.device.type == "cuda"
    for _ in range(arguments.rounds + 1):
        for packing, trainer in trainers.items():
            before = torch.cuda.memory_allocated() if on_gpu else 0
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            taken[packing].append(trainer.step(rows))
            peaks[packing] = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    medians: dict[Packing, float] = {}
    for packing, steps in taken.items():
        medians[packing] = statistics.median(step.seconds for step in steps[1:])  # the first warms up
        print(
            f"{packing.value:<10}{steps[0].padding_share:>9.1%}{medians[packing]:>10.3f}"
            f"{lengths.sum() / medians[packing]:>12,.0f}{medians[Packing.NEVER] / medians[packing]:>8.2f}"
            f"{peaks[packing] / 2**30:>6.1f}"
        )


if __name__ == "__main__":
    main()
