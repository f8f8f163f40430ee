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
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from support.models import tiny_qwen3
from support.rows import random_pairs, random_rows
from unbroken.training.config import Correction, CorrectionKind, DpoConfig, OldLogprobs, OptimizerConfig, TrainerConfig
from unbroken.training.normalization import LossNormalization
from unbroken.training.pairs import PreferencePair
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample

NUM_ROWS = ((6, 3), (6, 0), (1, 6))
"""Per step, the rows or pairs of process 0 and of process 1: uneven on purpose."""


def config(**changes: Any) -> TrainerConfig:
    """Passes of a row or two, and an optimizer without a jump where a gradient is near zero."""
    optimizer = OptimizerConfig(learning_rate=1e-2, eps=1e-2)
    return TrainerConfig(optimizer=optimizer, tokens_per_micro_batch=25, **changes)


CONFIGS = {
    "plain": config(),
    "two-minibatches": config(num_minibatches=2),
    "sequence": config(normalization=LossNormalization.SEQUENCE, kl_weight=0.1),
    "dpo": config(dpo=DpoConfig(beta=0.3)),
    "constant": config(
        normalization=LossNormalization.CONSTANT,
        max_row_tokens=20,
        old_logprobs=OldLogprobs.RECOMPUTE,
        correction=Correction(kind=CorrectionKind.TOKEN_TRUNCATE, high=4.0),
    ),
}


def trainer_of(name: str, accelerator: Accelerator | None = None) -> Trainer:
    """A trainer with one of `CONFIGS`."""
    reference = tiny_qwen3(seed=1) if CONFIGS[name].has_reference else None
    return Trainer(tiny_qwen3(), CONFIGS[name], accelerator=accelerator, reference=reference)


def samples_of(config_name: str, rank: int, step: int) -> list[TrainingSample] | list[PreferencePair]:
    """The rows, or pairs, of one process in one step."""
    draw = random_rows if CONFIGS[config_name].dpo is None else random_pairs
    return draw(np.random.default_rng(10 * step + rank), NUM_ROWS[step][rank])


def main() -> None:
    """Train, and save what this process ends up with."""
    faulthandler.dump_traceback_later(60, exit=True)  # a process that waits for the other one forever says where
    rank, directory = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    for config_name in CONFIGS:
        trainer = trainer_of(config_name, accelerator)
        stats = [asdict(trainer.step(samples_of(config_name, rank, step))) for step in range(len(NUM_ROWS))]
        name = f"{config_name}-{rank}"
        torch.save(dict(trainer.named_weights()), directory / f"weights-{name}.pt")
        (directory / f"stats-{name}.json").write_text(json.dumps(stats))
        resumed = trainer_of(config_name, accelerator)
        trainer.save(directory / f"checkpoint-{config_name}", extra={"rank": rank})
        assert resumed.load(directory / f"checkpoint-{config_name}") == {"rank": rank}
        for went_on, how in ((trainer, "whole"), (resumed, "resumed")):
            went_on.step(samples_of(config_name, rank, 0))
            torch.save(dict(went_on.named_weights()), directory / f"weights-{how}-{name}.pt")
    accelerator.wait_for_everyone()
    os._exit(0)  # taking gloo's threads down in order hangs now and then, after all the work is done


if __name__ == "__main__":
    main()
