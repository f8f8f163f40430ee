"""One of two processes that train an image-text model together, where only some of the rows have images.

Argument: the folder that holds a saved model for each family and takes weights and statistics. Rank, world size and
rendezvous are in torch's usual environment variables.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from support.image_rows import Vision, random_image_row
from support.sharded import WHOLE, shared
from support.vision import FAMILIES, picture
from unbroken.errors import InvalidInputError
from unbroken.training.config import OptimizerConfig, ParallelConfig, TrainerConfig
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample

NUM_IMAGES = (
    ((0, 2, 1, 1), (0, 0)),
    ((1, 0, 3), ()),
    ((0, 0), (0, 0, 0)),
    ((0,), (2, 2, 0, 1, 1)),
    ((2, 0), (1, 1, 0)),
)
"""Per step, the images in each row of process 0 and of process 1: in the first a process has rows without any, in the
second no rows, in the third there is no image anywhere, then the other process has them, and at last both do."""


KINDS = {"ddp": WHOLE, "fsdp": ParallelConfig(fsdp=2)}
"""How the processes share the model."""


def config(parallel: ParallelConfig = WHOLE) -> TrainerConfig:
    """Passes of one or two rows, and an optimizer that makes no jump where a gradient is near zero.

    Gradients are not clipped: next to the text's, those of the vision tower would be too small to compare.
    """
    optimizer = OptimizerConfig(learning_rate=1e-2, eps=1e-3, max_grad_norm=math.inf)
    return TrainerConfig(optimizer=optimizer, tokens_per_micro_batch=60, parallel=parallel)


def rows_of(vision: Vision, rank: int, step: int) -> list[TrainingSample]:
    """The rows of one process in one step."""
    rng = np.random.default_rng(10 * step + rank)
    pictures = [picture(56, 56), picture(28, 84, seed=1)]
    return [random_image_row(vision, rng, pictures, num_images) for num_images in NUM_IMAGES[step][rank]]


def refuse(vision: Vision, trainer: Trainer, rank: int) -> str:
    """The error of a step on this process when process 1 has lost the images of a row."""
    rows = [vision.row("look: ", picture(56, 56), (5, 6))]
    try:
        trainer.step([replace(row, images=()) for row in rows] if rank == 1 else rows)
    except InvalidInputError as error:
        return str(error)
    return ""


def main() -> None:
    """Train each family, and save the results of this process."""
    faulthandler.dump_traceback_later(400, exit=True)  # a process that waits for the other one forever says where
    rank, directory = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    for kind, parallel in KINDS.items():
        for family in FAMILIES:
            vision = Vision.load(directory / family, family)
            trainer = Trainer(
                shared(vision.model(), parallel), config(parallel), accelerator=accelerator, images=vision.images
            )
            is_sharded = {isinstance(parameter, DTensor) for parameter in trainer.backend.policy.parameters()}
            assert is_sharded == {parallel.is_sharded}
            name = f"{kind}-{family}-{rank}"
            (directory / f"refused-{name}.txt").write_text(refuse(vision, trainer, rank))
            stats = [asdict(trainer.step(rows_of(vision, rank, step))) for step in range(len(NUM_IMAGES))]
            torch.save(dict(trainer.named_weights()), directory / f"weights-{name}.pt")
            (directory / f"stats-{name}.json").write_text(json.dumps(stats))
    accelerator.wait_for_everyone()
    os._exit(0)  # taking gloo's threads down in order hangs now and then, after all the work is done


if __name__ == "__main__":
    main()
