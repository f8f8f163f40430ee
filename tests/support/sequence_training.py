"""One of several processes that train together and share the ids of their rows, two by two; a test starts it.

Argument: the folder to save weights and statistics into.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from support.adapted import with_lora
from support.architectures import tiny_model
from support.models import tiny_qwen3
from support.prefixes import branching_rows
from support.rows import random_rows
from support.sharded import shared
from unbroken.training.config import (
    OldLogprobs,
    OptimizerConfig,
    ParallelConfig,
    Reference,
    SharedPrefixes,
    TrainerConfig,
)
from unbroken.training.loss_config import LossNormalization
from unbroken.training.teachers import Teachers
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample

NUM_ROWS = ((6, 3), (5, 0), (1, 6))
"""Per step, the rows of the first and of the last process."""
KINDS = ("ddp", "fsdp2")
"""How the processes share the model."""
CASES = [
    ("ddp", "packed"),
    ("ddp", "shared"),
    ("ddp", "lora"),
    ("ddp", "experts"),
    *(("fsdp2", name) for name in ("packed", "shared", "lora")),
]
"""Of `KINDS` and `CONFIGS`."""


def config(**changes: Any) -> TrainerConfig:
    optimizer = OptimizerConfig(learning_rate=1e-2, eps=1e-2)
    return TrainerConfig(optimizer=optimizer, tokens_per_micro_batch=25, **changes)


CONFIGS = {
    "packed": config(normalization=LossNormalization.SEQUENCE, kl_weight=0.1, teacher_weight=0.5),
    "shared": config(shared_prefixes=SharedPrefixes.ALWAYS, gradient_checkpointing=True),
    "lora": config(kl_weight=0.1, old_logprobs=OldLogprobs.RECOMPUTE, num_iterations=2),
    "experts": config(routing_replay=True, router_loss_weight=3.0, entropy_weight=0.05),
}


def make_trainer(name: str, kind: str | None = None) -> Trainer:
    """A trainer with one of `CONFIGS`, of processes of one of `KINDS`, or of one process."""
    num_shards = int(os.environ["WORLD_SIZE"]) if kind == "fsdp2" else 1
    parallel = ParallelConfig(sequence=1 if kind is None else 2, fsdp=num_shards)
    model = shared(tiny_model("qwen3_moe") if name == "experts" else tiny_qwen3(), parallel)
    model = with_lora(model) if name == "lora" else model
    references = {"packed": lambda: shared(tiny_qwen3(seed=1), parallel), "lora": lambda: Reference.BASE}
    teachers = Teachers(models={"teacher": shared(tiny_qwen3(seed=2), parallel)}) if name == "packed" else None
    return Trainer(
        model,
        replace(CONFIGS[name], parallel=parallel),
        accelerator=None if kind is None else Accelerator(cpu=True),
        reference=references.get(name, lambda: None)(),
        teachers=teachers,
    )


def make_rows(name: str, step: int, which: int) -> list[TrainingSample]:
    """Those of the first or of the last process in one step."""
    rng = np.random.default_rng(10 * step + which)
    draw = branching_rows if name == "shared" else random_rows
    rows = draw(rng, NUM_ROWS[step][which])
    if name != "experts":
        return rows
    experts = [np.argsort(rng.random((len(row.token_ids) - 1, 2, 8)))[..., :2].astype(np.uint8) for row in rows]
    return [replace(row, routed_experts=each) for row, each in zip(rows, experts, strict=True)]


def train(name: str, trainer: Trainer, parts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Train a process's rows, and return the statistics of the steps."""
    return [
        asdict(trainer.step([row for part in parts for row in make_rows(name, step, part)]))
        for step in range(len(NUM_ROWS))
    ]


def main() -> None:
    faulthandler.dump_traceback_later(400, exit=True)
    torch.set_num_threads(1)
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    parts = {0: (0,), int(os.environ["WORLD_SIZE"]) - 1: (1,)}.get(rank, ())
    for kind, name in CASES:
        trainer = make_trainer(name, kind)
        stats = train(name, trainer, parts)
        scored = trainer.logprobs(make_rows(name, 0, 0)[: 2 + rank])
        torch.save([torch.from_numpy(row) for row in scored], folder / f"logprobs-{kind}-{name}-{rank}.pt")
        torch.save(dict(trainer.named_weights()), folder / f"weights-{kind}-{name}-{rank}.pt")
        (folder / f"stats-{kind}-{name}-{rank}.json").write_text(json.dumps(stats))
    Accelerator(cpu=True).wait_for_everyone()
    os._exit(0)  # taking gloo's threads down in order hangs now and then, after all the work is done


if __name__ == "__main__":
    main()
