"""One of several processes that train together, each on its own rows: a test starts it as a script.

Argument: the folder to save weights and statistics into. Rank, world size and rendezvous are in torch's usual
environment variables.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from support.models import tiny_qwen3
from support.rows import random_rows
from unbroken.training.config import OptimizerConfig, TrainerConfig
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample

NUM_ROWS = ((6, 3), (6, 0), (1, 6))
"""Per step, the rows of process 0 and of process 1: uneven on purpose."""


def config(num_minibatches: int) -> TrainerConfig:
    """Passes of a row or two, and an optimizer without a jump where a gradient is near zero."""
    optimizer = OptimizerConfig(learning_rate=1e-2, eps=1e-2)
    return TrainerConfig(optimizer=optimizer, num_minibatches=num_minibatches, tokens_per_micro_batch=25)


def rows_of(rank: int, step: int) -> list[TrainingSample]:
    """The rows of one process in one step."""
    return random_rows(np.random.default_rng(10 * step + rank), NUM_ROWS[step][rank])


def main() -> None:
    """Train, and save what this process ends up with."""
    faulthandler.dump_traceback_later(60, exit=True)  # a process that waits for the other one forever says where
    rank, directory = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    for num_minibatches in (1, 2):
        trainer = Trainer(tiny_qwen3(), config(num_minibatches), accelerator=accelerator)
        stats = [asdict(trainer.step(rows_of(rank, step))) for step in range(len(NUM_ROWS))]
        name = f"{num_minibatches}-{rank}"
        torch.save(dict(trainer.named_weights()), directory / f"weights-{name}.pt")
        (directory / f"stats-{name}.json").write_text(json.dumps(stats))
    accelerator.wait_for_everyone()
    os._exit(0)  # taking gloo's threads down in order hangs now and then, after all the work is done


if __name__ == "__main__":
    main()
