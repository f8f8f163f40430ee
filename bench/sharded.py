"""Train on the same rows with one process and with two (DDP and FSDP2), and compare numbers, memory, seconds.

    OMP_NUM_THREADS=1 python bench/sharded.py                                            # tiny model, two CPU processes
    python bench/sharded.py --shape 0.6b --dtype bf16 --num-rows 32 --length 1024        # two GPUs

`torchrun` starts each side, which trains the same steps on the same random rows; two
processes share the rows. Prints the largest differences from one process in loss, gradient norm and logprobs, the
seconds of a step (median, without the first) and of gathering all weights, and the peak memory of a process. With
`--lora` only adapters of rank 16 are trained, and the reference is the base without them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM

from unbroken.training.config import OptimizerConfig, ParallelConfig, Reference, TrainerConfig
from unbroken.training.model.sharding import make_distributed_config
from unbroken.training.trainer import Trainer
from unbroken.types import NO_VERSION, TrainingSample, token_ids

_SHAPES = {
    "tiny": {
        "vocab_size": 2048, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128,
    },
    "0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Measurements of one side; statistics are over all processes."""

    losses: list[float]
    grad_norms: list[float]
    logprobs: list[float]
    step_s: float
    gather_s: float
    memory_gib: float
    """Of the first process; 0 on a CPU."""


def main() -> None:
    """Start each side and compare them; with `--worker`, be one process of a side."""
    arguments = _parse_args()
    if arguments.worker is not None:
        _train(arguments)
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu and torch.cuda.device_count() < 2:
        raise SystemExit(f"two GPUs or none are needed, found {torch.cuda.device_count()}")
    sides = {"one process": (1, []), "DDP": (2, []), "FSDP2": (2, ["--fsdp", "2"])}
    runs = {name: _run_side(num_processes, options) for name, (num_processes, options) in sides.items()}
    one = runs["one process"]
    print(f"{'':12} {'loss':>9} {'norm':>9} {'logprobs':>9} {'step s':>8} {'gather s':>9} {'GiB':>6}")
    for name, run in runs.items():
        print(
            f"{name:12} {_distance(run.losses, one.losses):9.1e} {_distance(run.grad_norms, one.grad_norms):9.1e} "
            f"{_distance(run.logprobs, one.logprobs):9.1e} {run.step_s:8.2f} {run.gather_s:9.2f} "
            f"{run.memory_gib:6.1f}"
        )
    print(f"losses of one process: {', '.join(f'{loss:.5f}' for loss in one.losses)}")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=_SHAPES, default="tiny")
    parser.add_argument("--dtype", choices=("no", "bf16"), default="no", help="accelerate's mixed precision")
    parser.add_argument("--num-rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="ids of the longest row")
    parser.add_argument("--num-steps", type=int, default=4)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fsdp", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_side(num_processes: int, options: list[str]) -> Run:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "run.json"
        launch = ["torch.distributed.run", "--nproc_per_node", str(num_processes), "--master_port", str(port)]
        command = [sys.executable, "-m", *launch, __file__, *sys.argv[1:], *options, "--worker", str(result)]
        subprocess.run(command, check=True)
        return Run(**json.loads(result.read_text()))


def _train(arguments: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=arguments.dtype)
    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-5, eps=1e-4),
        tokens_per_micro_batch=4 * arguments.length,
        kl_weight=0.01 if arguments.lora else 0.0,
        parallel=ParallelConfig(fsdp=arguments.fsdp),
    )
    reference = Reference.BASE if arguments.lora else None
    model = _make_model(arguments, config.parallel)
    trainer = Trainer(model, config, accelerator=accelerator, reference=reference)
    rows = _make_rows(arguments.num_rows, arguments.length, _SHAPES[arguments.shape]["vocab_size"])
    mine = rows[accelerator.process_index :: accelerator.num_processes]
    with ThreadPoolExecutor(1) as thread:  # as in the training loop
        steps = [thread.submit(trainer.step, mine).result() for _ in range(arguments.num_steps)]
        logprobs = thread.submit(trainer.logprobs, rows[:4]).result()
    started = time.perf_counter()
    for _ in trainer.named_weights():
        pass
    run = Run(
        losses=[step.loss for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        logprobs=np.concatenate([each[np.isfinite(each)] for each in logprobs]).tolist(),
        step_s=statistics.median(step.seconds for step in steps[1:]),
        gather_s=time.perf_counter() - started,
        memory_gib=torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
    )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        arguments.worker.write_text(json.dumps(asdict(run)))
    sys.stdout.flush()
    os._exit(0)  # a regular exit sometimes hangs while gloo ends its threads


def _make_model(arguments: argparse.Namespace, parallel: ParallelConfig) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(**_SHAPES[arguments.shape], max_position_embeddings=4096, tie_word_embeddings=True)
    model: Any = Qwen3ForCausalLM(config)
    if parallel.is_sharded:
        folder = arguments.worker.parent / "model"  # the first process alone writes it
        model.save_pretrained(folder)
        torch.distributed.barrier()
        shards = make_distributed_config(parallel, is_bfloat16=arguments.dtype == "bf16")
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=shards)
    if not arguments.lora:
        return model
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=targets))


def _make_rows(num_rows: int, length: int, vocab_size: int) -> list[TrainingSample]:
    """Random rows of half to the whole length, whose second half is sampled."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(num_rows):
        num_ids = int(rng.integers(length // 2, length + 1))
        sampled = np.arange(num_ids) >= num_ids // 2
        rows.append(
            TrainingSample(
                token_ids=token_ids(rng.integers(vocab_size, size=num_ids)),
                sampled_mask=sampled,
                loss_mask=sampled,
                rollout_logprobs=np.where(sampled, -np.log(vocab_size), np.nan),
                policy_versions=np.where(sampled, 0, NO_VERSION),
                advantages=np.where(sampled, float(rng.normal()), 0.0),
                temperature=1.0,
            )
        )
    return rows


def _distance(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
