"""Training steps of large shapes on one GPU: memory, the size of a pass, ids per second, and what the kernels are.

    OMP_NUM_THREADS=4 python bench/sizes.py 8b-lora       # also 14b-lora, 4b-full, 8b-lora-compiled, 4b-full-8bit, ...
    OMP_NUM_THREADS=1 python bench/sizes.py tiny-lora     # a CPU, seconds, no memory

A part is a shape of `bench/grpo_task.py` and words: `lora` (rank 32 on all linear layers, on a base in bfloat16) or
`full`, `float32` (that base), `compiled`, `checkpointing`, `8bit` (AdamW's state). A Qwen3 with random weights, made on
the device, trains on ragged rows, whose second half is sampled. `twice` also tries passes of twice the size.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM

from grpo_task import SHAPES, UNTIED, make_lora
from unbroken.training.config import OptimizerConfig, OptimizerName, TrainerConfig
from unbroken.training.trainer import Trainer
from unbroken.types import NO_VERSION, TrainingSample

WORDS = ("lora", "full", "float32", "compiled", "checkpointing", "8bit", "twice")
NUM_ROWS = {"tiny": 12, "14b": 48}
"""96 of the other shapes."""
PEAK_FLOPS = 790e12
"""A second, that MFU is a share of: dense bfloat16 products that an H200 reaches."""
KERNELS = {
    "products": r"gemm|nvjet|cutlass|xmma|splitK|s16816|sm90_",
    "attention": r"flash|fmha|attention|mha",
    "copies and casts": r"copy|Memcpy|convert|cast",
    "norms": r"norm",
    "optimizer": r"multi_tensor|adam|foreach",
    "triton": r"triton",
    "elementwise": r"elementwise|reduce|softmax|scatter|index|cat|gather|fill|Memset",
}
"""Kinds by their names; the first that matches counts."""
ON_GPU = torch.cuda.is_available()


def now() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def gib(name: str = "max_memory_allocated") -> float:
    return float(getattr(torch.cuda, name)()) / 2**30 if ON_GPU else 0.0


def restart_peak() -> None:
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()


def make_model(shape: str, *, is_lora: bool) -> Any:
    """On the device, in float32, or in bfloat16 below an adapter whose B is not 0."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if is_lora and ON_GPU else torch.float32)
    sizes: dict[str, Any] = {**SHAPES[shape], "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with torch.device("cuda" if ON_GPU else "cpu"):
        model: Any = Qwen3ForCausalLM(
            Qwen3Config(**sizes, max_position_embeddings=4096, tie_word_embeddings=shape not in UNTIED)
        )
    torch.set_default_dtype(torch.float32)
    if is_lora:
        from peft import get_peft_model

        model = get_peft_model(model, make_lora(32))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.002)
    return model


@torch.no_grad()
def score(model: Any, row: TrainingSample) -> Any:
    """Logprobs of the row's ids after the first, as an engine computes them."""
    ids = torch.tensor(row.token_ids[None].astype(np.int64), device=model.device)
    logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu().double().numpy()


def count_flops(shape: str, rows: Sequence[TrainingSample], *, is_lora: bool) -> float:
    """Of a step without recomputation. A frozen matrix has no product for its own gradient: 4 FLOPs a weight, not 6."""
    sizes = SHAPES[shape]
    heads, keys = (sizes[name] * sizes["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    attention = sizes["hidden_size"] * 2 * (heads + keys)
    layer = attention + 3 * sizes["hidden_size"] * sizes["intermediate_size"]
    lengths = np.array([len(row.token_ids) for row in rows], dtype=np.float64)
    num_scored = sum(int(row.loss_mask.sum()) for row in rows)
    products = sizes["num_hidden_layers"] * layer * lengths.sum()
    products += sizes["vocab_size"] * sizes["hidden_size"] * num_scored
    return float((4 if is_lora else 6) * products + 7 * heads * sizes["num_hidden_layers"] * np.square(lengths).sum())


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


class Part:
    """One trainer, and lines about it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.shape, *words = name.split("-")
        if self.shape not in SHAPES or not set(words) <= set(WORDS):
            raise SystemExit(f"{name}: a shape of {', '.join(SHAPES)} and words of {', '.join(WORDS)}, joined by -")
        self.words = words
        self.is_lora = "lora" in words
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(np.log(560), 0.6, NUM_ROWS.get(self.shape, 96)), 64, 2048).astype(int)
        self.num_ids = int(lengths.sum())
        self.rows = make_rows(lengths.tolist(), SHAPES[self.shape]["vocab_size"], rng)

    def say(self, text: str) -> None:
        print(f"{self.name}: {text}", flush=True)

    def start(self) -> None:
        """Make the trainer, compare its logprobs with the plain model's, and measure the size of a pass."""
        started = now()
        model = make_model(self.shape, is_lora=self.is_lora)
        scored = self.rows[: 6 if ON_GPU else 1] if self.is_lora else []
        plain = [score(model, row) for row in scored]
        if "float32" in self.words:
            model = model.float()
        made = now()
        self.say(f"model made in {made - started:.1f} s, {gib('memory_allocated'):.1f} GiB")
        optimizer = OptimizerConfig(
            learning_rate=1e-9, name=OptimizerName.ADAMW_8BIT if "8bit" in self.words else OptimizerName.ADAMW
        )
        config = TrainerConfig(
            optimizer=optimizer, compile="compiled" in self.words, gradient_checkpointing="checkpointing" in self.words
        )
        self.trainer = Trainer(model, config, accelerator=Accelerator(mixed_precision="bf16" if ON_GPU else None))
        self.backend: Any = self.trainer.backend
        ready = now()
        self.say(
            f"trainer made in {ready - made:.1f} s, {gib('memory_allocated'):.1f} GiB, layout "
            f"{self.backend.policy.layout}; {time.time() - psutil.Process().create_time():.1f} s since the start"
        )
        if scored:
            r = np.concatenate(
                [
                    own[row.sampled_mask] - other[row.sampled_mask[1:]]
                    for own, other, row in zip(self.trainer.logprobs(scored), plain, scored, strict=True)
                ]
            )
            self.say(f"k3 to the plain model before the trainer has it {np.mean(np.expm1(r) - r):.2e}")
        restart_peak()
        started = now()
        self.backend.measure()
        self.say(f"measured in {now() - started:.1f} s, peak {gib():.1f} GiB: {self.backend.passes.memory}")

    def step(self, rows: Sequence[TrainingSample]) -> float:
        """Seconds of a step on rows of the weights of now."""
        version = self.trainer.policy_version
        own = [
            replace(row, policy_versions=np.where(row.sampled_mask, version, NO_VERSION).astype(np.int32))
            for row in rows
        ]
        started = now()
        self.trainer.step(own)
        return now() - started

    def time_steps(self) -> None:
        restart_peak()
        first, *others = (self.step(self.rows) for _ in range(3))
        best = min(others)
        share = count_flops(self.shape, self.rows, is_lora=self.is_lora) / best / PEAK_FLOPS
        self.say(
            f"{self.num_ids} ids: first step {first:.1f} s, then {', '.join(f'{s:.2f}' for s in others)} s, "
            f"{self.num_ids / best:,.0f} ids/s, MFU {share:.3f}, peak {gib():.1f} GiB, reserved "
            f"{gib('max_memory_reserved'):.1f}"
        )

    def measure_slope(self) -> None:
        """What an id of a pass really takes, now that gradients and the optimizer's state are there."""
        size, peaks = self.backend.passes.size, []
        for ids in (size // 2, size, *([2 * size] if "twice" in self.words else [])):
            self.backend.passes.size = ids
            restart_peak()
            before = gib("memory_allocated")
            seconds = self.step(self.rows)
            peaks.append(1024 * (gib() - before))
            self.say(f"passes of {ids} ids: {self.num_ids / seconds:,.0f} ids/s, {peaks[-1]:.0f} MiB over what is kept")
        self.say(f"{(peaks[1] - peaks[0]) / (size - size // 2):.2f} MiB an id")
        self.backend.passes.size = size

    def profile(self) -> None:
        """Shares of the kernels of a step of a third of the rows."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step(self.rows[: len(self.rows) // 3])
        kinds: Counter[str] = Counter()
        for event in profile.key_averages():
            kind = next((kind for kind, pattern in KERNELS.items() if re.search(pattern, event.key)), "other")
            kinds[kind] += event.self_device_time_total
        total = sum(kinds.values())
        shares = ", ".join(f"{kind} {us / total:.1%}" for kind, us in kinds.most_common() if us)
        self.say(f"kernels of a step, {total / 1e6:.2f} s: {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="8b-lora" if ON_GPU else "tiny-lora")
    part = Part(parser.parse_args().part)
    part.start()
    part.time_steps()
    if ON_GPU:
        part.measure_slope()
        part.profile()


if __name__ == "__main__":
    main()
