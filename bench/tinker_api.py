"""A step of reinforcement learning by the Tinker API's models beside our own trainer's, on the same rows.

    OMP_NUM_THREADS=1 python bench/tinker_api.py                                       a CPU, a tiny model
    OMP_NUM_THREADS=4 python bench/tinker_api.py --shape 4b --median 560 --rows 96     a GPU

Both train a LoRA of rank 32 on all linear layers of one Qwen3 with random weights, by PPO's clipped loss, one update a
step: the trainer by `Trainer.step`, the models by a `forward_backward` and an `optim_step`, without a server between.
Rows have a prompt of half their ids, whose logprobs the API returns too. Rounds alternate. `--models` then counts what
further adapters on the same base take.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import peft
import torch
from accelerate import Accelerator
from tinker.types import AdamParams, LoraConfig
from transformers import Qwen3Config, Qwen3ForCausalLM

from grpo_task import SHAPES, UNTIED
from packing import make_rows
from unbroken.tinker.data import Datum
from unbroken.tinker.models import Models
from unbroken.training.config import OptimizerConfig, SharedPrefixes, TrainerConfig
from unbroken.training.trainer import Trainer
from unbroken.types import NO_VERSION, TrainingSample

ON_GPU = torch.cuda.is_available()
RANK = 32


def now() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def used_mib() -> float:
    """Of the GPU; or of all tensors, because a process keeps memory that it has freed."""
    gc.collect()
    if ON_GPU:
        return float(torch.cuda.memory_allocated()) / 2**20
    stores = [each.untyped_storage() for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return float(sum({store.data_ptr(): store.nbytes() for store in stores}.values())) / 2**20


def save_model(folder: Path, shape: str, longest: int) -> None:
    torch.manual_seed(0)
    sizes = {**SHAPES[shape], "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with torch.device("cuda" if ON_GPU else "cpu"):
        config = Qwen3Config(**sizes, max_position_embeddings=longest, tie_word_embeddings=shape not in UNTIED)
        model = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16 if ON_GPU else torch.float32).save_pretrained(folder)


def make_trainer(folder: Path, accelerator: Accelerator) -> Trainer:
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if ON_GPU else torch.float32)
    lora = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-9, max_grad_norm=float("inf")),
        shared_prefixes=SharedPrefixes.NEVER,
    )
    return Trainer(peft.get_peft_model(model, lora), config, accelerator=accelerator)


def make_datum(row: TrainingSample) -> Datum:
    inputs = {"logprobs": np.where(row.sampled_mask, row.rollout_logprobs, 0)[1:], "advantages": row.advantages[1:]}
    return Datum(
        input_ids=row.token_ids[:-1],
        targets=row.token_ids[1:].astype(np.int64),
        inputs={name: values.astype(np.float32) for name, values in inputs.items()},
    )


def time_trainer(trainer: Trainer, rows: list[TrainingSample]) -> tuple[float, float]:
    """Seconds of a step; its passes are not apart from its update."""
    fresh = [
        TrainingSample(
            token_ids=row.token_ids,
            sampled_mask=row.sampled_mask,
            loss_mask=row.loss_mask,
            rollout_logprobs=row.rollout_logprobs,
            policy_versions=np.where(row.sampled_mask, trainer.policy_version, NO_VERSION).astype(np.int32),
            advantages=row.advantages,
        )
        for row in rows
    ]
    started = now()
    trainer.step(fresh)
    seconds = now() - started
    return seconds, seconds


def time_models(models: Models, data: list[Datum], loss: str) -> tuple[float, float]:
    """Seconds of a step, and of its `forward_backward`."""
    started = now()
    models.forward_backward("a", data, loss, {}, backward=True)
    passed = now()
    models.optim_step("a", AdamParams(learning_rate=1e-9))
    return now() - started, passed - started


def count_memory(models: Models, data: list[Datum], number: int) -> None:
    """What one more model takes: its adapter; and after a step also its averages."""
    before = used_mib()
    for k in range(number):
        models.create(f"more-{k}", LoraConfig(rank=RANK, train_unembed=False))
    made = used_mib()
    for k in range(number):
        models.forward_backward(f"more-{k}", data[:1], "ppo", {}, backward=True)
        models.optim_step(f"more-{k}", AdamParams(learning_rate=1e-9))
    trained = used_mib()
    size = sum(tensor.nbytes for _, tensor in models.adapter("a")) / 2**20
    print(
        f"{number} more adapters of {size:.2f} MiB: {(made - before) / number:.2f} MiB each, "
        f"{(trained - before) / number:.2f} after a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--median", type=int, default=200)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=int, default=8)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(arguments.median), 0.6, arguments.rows), 16, arguments.longest).astype(int)
    rows = make_rows(lengths.tolist(), SHAPES[arguments.shape]["vocab_size"], rng)
    data = [make_datum(row) for row in rows]
    accelerator = Accelerator(mixed_precision="bf16" if ON_GPU else "no")
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), arguments.shape, arguments.longest)
        trainer = make_trainer(Path(folder), accelerator)
        models = Models(folder, accelerator=accelerator)
        models.create("a", LoraConfig(rank=RANK, train_unembed=False))
    taken = {"Trainer.step": [time_trainer(trainer, rows)], "ppo": [time_models(models, data, "ppo")]}
    for _ in range(arguments.rounds):
        taken["Trainer.step"].append(time_trainer(trainer, rows))
        taken["ppo"].append(time_models(models, data, "ppo"))
    num_ids = int(lengths.sum())
    device = torch.cuda.get_device_name() if ON_GPU else f"CPU, {torch.get_num_threads()} threads"
    print(f"{device}, {arguments.shape}: {arguments.rows} rows, {num_ids:,} ids, half of them sampled")
    for name, rounds in taken.items():
        step, passes = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
        print(f"{name:<14} step {step:.3f} s    forward_backward {num_ids / passes:>9,.0f} ids/s")
    ratios = [own[0] / other[0] for own, other in zip(taken["ppo"][1:], taken["Trainer.step"][1:], strict=True)]
    print(f"a step takes {statistics.median(ratios):.2f} times as long ({min(ratios):.2f} to {max(ratios):.2f})")
    if arguments.models:
        count_memory(models, data, arguments.models)


if __name__ == "__main__":
    main()
