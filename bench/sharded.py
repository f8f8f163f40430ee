"""Train on the same rows with one process and with two (DDP, FSDP2, experts), and compare numbers, memory, seconds.

    OMP_NUM_THREADS=1 python bench/sharded.py                                            # tiny model, two CPU processes
    python bench/sharded.py --shape 0.6b --dtype bf16 --num-rows 32 --length 1024        # two GPUs
    export OMP_NUM_THREADS=1 PYTHONPATH=.venv/transformers-newer                          # experts need it
    python bench/sharded.py --shape 30b-a3b --layers 1 --vocab-size 16384 --lora         # 8 GB, two CPU processes
    python bench/sharded.py --shape 30b-a3b --layers 4 --dtype bf16 --lora --replay --length 2048          # two GPUs
    python bench/sharded.py --shape 30b-a3b --dtype bf16 --lora --replay --length 8192 --processes 8 --sides experts

`torchrun` starts each side, which trains the same steps on the same random rows; the processes share the rows. A
mixture of experts is trained by FSDP2 with different experts in each process, and not by DDP; with `--replay` each id
has experts that are drawn, as a sampler would have recorded them. A process of its own writes random weights to a
folder, from which each side loads what it holds. Prints the largest differences from one process in loss, gradient
norm, logprobs after all steps and adapters, the seconds of a step (median, without the first) and of gathering all
weights, ids a second, and the peak memory of a process: of the GPU, or on a CPU its resident pages, in which the
model's mapped file counts until it is loaded. With `--lora` only adapters of rank 16 are trained, of a mixture of
experts those of attention, and the reference is the base without them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
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
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

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
    "30b-a3b": {
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
}  # fmt: skip
_ALONE = "one process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Measurements of one side; statistics are over all processes."""

    losses: list[float]
    grad_norms: list[float]
    logprobs: list[float]
    step_s: float
    gather_s: float
    load_gib: float
    step_gib: float
    gather_gib: float
    """Peaks of the process that needs most: until the model is loaded, until the steps are done, and in all."""


def main() -> None:
    """Start each side and compare them; with `--worker`, be one process of a side."""
    arguments = _parse_args()
    if arguments.worker is not None:
        _save_model(arguments) if arguments.side == "save" else _train(arguments)
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu and torch.cuda.device_count() < arguments.processes:
        raise SystemExit(f"{arguments.processes} GPUs or none are needed, found {torch.cuda.device_count()}")
    sides = [_ALONE, *(["experts"] if _is_moe(arguments) else ["DDP", "FSDP2"])]
    names = sides if arguments.sides is None else arguments.sides.split(",")
    with tempfile.TemporaryDirectory() as folder:
        _start("save", Path(folder), num_processes=1)
        runs = {name: _run_side(name, Path(folder), arguments) for name in names}
        adapters = {name: np.load(Path(folder, f"{name}.npy")) for name in names}
    one = runs[names[0]]
    num_ids = sum(len(row.token_ids) for row in _make_rows(arguments))
    print(f"{num_ids} ids a step; differences are from {names[0]}")
    columns = ("loss", "norm", "logprobs", "adapters", "step s", "ids/s", "gather s", "load GiB", "step GiB", "all GiB")
    print(f"{'':12}" + "".join(f"{column:>10}" for column in columns))
    for name, run in runs.items():
        off = [
            *(_distance(getattr(run, field), getattr(one, field)) for field in ("losses", "grad_norms", "logprobs")),
            np.abs(adapters[name] - adapters[names[0]]).max(initial=0.0),
        ]
        numbers = (run.step_s, num_ids / run.step_s, run.gather_s, run.load_gib, run.step_gib, run.gather_gib)
        print(f"{name:12}" + "".join(f"{x:10.1e}" for x in off) + "".join(f"{x:10.2f}" for x in numbers))
    print(f"losses of {names[0]}: {', '.join(f'{loss:.5f}' for loss in one.losses)}")
    print(f"gradient norms: {', '.join(f'{norm:.5f}' for norm in one.grad_norms)}")
    whole = adapters[names[0]]
    print(f"adapters: {whole.size} weights, the largest {np.abs(whole).max(initial=0.0):.4f}")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=_SHAPES, default="tiny")
    parser.add_argument("--layers", type=int, help="of the shape's; all by default")
    parser.add_argument("--vocab-size", type=int, help="the shape's by default")
    parser.add_argument("--dtype", choices=("no", "bf16"), default="no", help="accelerate's mixed precision")
    parser.add_argument("--num-rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="ids of the longest row")
    parser.add_argument("--num-steps", type=int, default=4)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--replay", action="store_true", help="of a mixture of experts: rows have their experts")
    parser.add_argument("--processes", type=int, default=2, help="of each side but one process")
    parser.add_argument("--sides", help=f"of {_ALONE!r}, DDP, FSDP2, experts; by default those that fit the model")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_side(name: str, folder: Path, arguments: argparse.Namespace) -> Run:
    _start(name, folder, num_processes=1 if name == _ALONE else arguments.processes)
    return Run(**json.loads((folder / f"{name}.json").read_text()))


def _start(name: str, folder: Path, *, num_processes: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = ["torch.distributed.run", "--nproc_per_node", str(num_processes), "--master_port", str(port)]
    command = [sys.executable, "-m", *launch, __file__, *sys.argv[1:], "--side", name, "--worker", str(folder)]
    subprocess.run(command, check=True)


def _train(arguments: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=arguments.dtype)
    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-3 if arguments.lora else 1e-5, eps=1e-4),
        tokens_per_micro_batch=4 * arguments.length,
        kl_weight=0.01 if arguments.lora else 0.0,
        parallel=_make_parallel(arguments),
        routing_replay=arguments.replay,
    )
    reference = Reference.BASE if arguments.lora else None
    model = _load_model(arguments, config.parallel)
    load_gib = _get_peak_gib()
    trainer = Trainer(model, config, accelerator=accelerator, reference=reference)
    rows = _make_rows(arguments)
    mine = rows[accelerator.process_index :: accelerator.num_processes]
    with ThreadPoolExecutor(1) as thread:  # as in the training loop
        steps = []
        for _ in range(arguments.num_steps):
            steps.append(thread.submit(trainer.step, mine).result())
            accelerator.print(f"{arguments.side}: step of {steps[-1].seconds:.2f} s", flush=True)
        logprobs = thread.submit(trainer.logprobs, rows[:4]).result()
    step_gib, started = _get_peak_gib(), time.perf_counter()
    for _ in trainer.named_weights():
        pass
    run = Run(
        losses=[step.loss for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        logprobs=np.concatenate([each[np.isfinite(each)] for each in logprobs]).tolist(),
        step_s=statistics.median(step.seconds for step in steps[1:]),
        gather_s=time.perf_counter() - started,
        load_gib=max(gather_object([load_gib])),
        step_gib=max(gather_object([step_gib])),
        gather_gib=max(gather_object([_get_peak_gib()])),
    )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (arguments.worker / f"{arguments.side}.json").write_text(json.dumps(asdict(run)))
        adapters = [weight for name, weight in model.named_parameters() if "lora_" in name]  # whole in each process
        np.save(
            arguments.worker / f"{arguments.side}.npy",
            np.concatenate([np.zeros(0, np.float32), *(each.detach().flatten().cpu().numpy() for each in adapters)]),
        )
    sys.stdout.flush()
    os._exit(0)  # a regular exit sometimes hangs while gloo ends its threads


def _make_parallel(arguments: argparse.Namespace) -> ParallelConfig:
    num = arguments.processes
    own = {"FSDP2": ParallelConfig(fsdp=num), "experts": ParallelConfig(fsdp=num, expert=num)}
    return own.get(arguments.side, ParallelConfig())


def _get_peak_gib() -> float:
    """Of the GPU, or without one the most resident pages of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _is_moe(arguments: argparse.Namespace) -> bool:
    return "num_experts" in _SHAPES[arguments.shape]


def _get_vocab_size(arguments: argparse.Namespace) -> int:
    return arguments.vocab_size or _SHAPES[arguments.shape]["vocab_size"]


def _save_model(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    is_moe = _is_moe(arguments)
    shape = dict(_SHAPES[arguments.shape], vocab_size=_get_vocab_size(arguments))
    shape["num_hidden_layers"] = arguments.layers or shape["num_hidden_layers"]
    kind = Qwen3MoeConfig if is_moe else Qwen3Config
    positions = max(4096, arguments.length)
    config = kind(**shape, max_position_embeddings=positions, tie_word_embeddings=not is_moe)
    # Random weights of 30B parameters take a CPU many minutes.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=_get_dtype(arguments))
    model.save_pretrained(arguments.worker / "model")


def _get_dtype(arguments: argparse.Namespace) -> torch.dtype:
    """Of the weights: a base that only adapters change is in bfloat16, as in a run."""
    return torch.bfloat16 if arguments.lora and arguments.dtype == "bf16" else torch.float32


def _load_model(arguments: argparse.Namespace, parallel: ParallelConfig) -> Any:
    shards = {}
    if parallel.is_sharded:
        shards["distributed_config"] = make_distributed_config(parallel, is_bfloat16=arguments.dtype == "bf16")
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.worker / "model", dtype=_get_dtype(arguments), **shards)
    if not arguments.lora:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    targets += [] if _is_moe(arguments) else ["gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=targets))


def _make_rows(arguments: argparse.Namespace) -> list[TrainingSample]:
    """Random rows of half to the whole length, whose second half is sampled."""
    rng, vocab_size, shape = np.random.default_rng(0), _get_vocab_size(arguments), _SHAPES[arguments.shape]
    num_layers = arguments.layers or shape["num_hidden_layers"]
    rows = []
    for _ in range(arguments.num_rows):
        num_ids = int(rng.integers(arguments.length // 2, arguments.length + 1))
        sampled = np.arange(num_ids) >= num_ids // 2
        experts = None
        if arguments.replay:
            drawn = rng.random((num_ids, num_layers, shape["num_experts"]), dtype=np.float32)
            experts = drawn.argpartition(shape["num_experts_per_tok"])[..., : shape["num_experts_per_tok"]].astype(
                np.uint8
            )
        rows.append(
            TrainingSample(
                token_ids=token_ids(rng.integers(vocab_size, size=num_ids)),
                sampled_mask=sampled,
                loss_mask=sampled,
                rollout_logprobs=np.where(sampled, -np.log(vocab_size), np.nan),
                policy_versions=np.where(sampled, 0, NO_VERSION),
                advantages=np.where(sampled, float(rng.normal()), 0.0),
                temperature=1.0,
                routed_experts=experts,
            )
        )
    return rows


def _distance(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
