"""One of several processes that share models in the ways of `CASES`; a test starts it by torchrun.

Arguments: the folder to save results into, and the names of cases.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from support.adapted import untied_qwen3, with_lora
from support.architectures import tiny_model
from support.image_rows import Vision, random_image_row
from support.models import tiny_qwen3
from support.rows import random_rows
from support.sharded import WHOLE, shared
from support.vision import Family, picture, save_vision_model
from unbroken.training.config import OptimizerConfig, ParallelConfig, Reference, SharedPrefixes, TrainerConfig
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.teachers import Teachers
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample

NUM_STEPS = 3
NUM_ROWS = (3, 0, 2, 4)
"""Those of each of four processes in a step; two processes have two of these each."""


@dataclass(frozen=True)
class Case:
    """A way to share a model, and what else is in use."""

    parallel: ParallelConfig
    model: Callable[[], Any] = tiny_qwen3
    lora: dict[str, Any] | None = None
    reference: bool = False
    teacher: bool = False
    replays: bool = False
    family: Family | None = None
    """Of an image-text model instead of `model`, whose rows have images."""
    config: dict[str, Any] = field(default_factory=dict)


_moe = partial(tiny_model, "qwen3_moe")
_experts = ParallelConfig(fsdp=2, expert=2)
CASES = {
    "fsdp": Case(ParallelConfig(fsdp=2), reference=True, teacher=True, config={"gradient_checkpointing": True}),
    "tensor": Case(ParallelConfig(tensor=2), reference=True, teacher=True),
    "rslora": Case(ParallelConfig(fsdp=2), lora={"use_rslora": True}, reference=True),
    "both": Case(ParallelConfig(fsdp=2, tensor=2), model=untied_qwen3, reference=True),
    "experts": Case(_experts, model=_moe, reference=True),
    "experts-replayed": Case(
        _experts, model=_moe, replays=True, config={"routing_replay": True, "gradient_checkpointing": True}
    ),
    "experts-lora": Case(_experts, model=_moe, lora={"target_modules": ["q_proj", "v_proj"]}, reference=True),
    "replicas": Case(ParallelConfig(fsdp=2, replicate=2), reference=True),
    "experts-replicas": Case(ParallelConfig(fsdp=2, replicate=2, expert=2), model=_moe),
    "experts-tensor": Case(ParallelConfig(fsdp=2, tensor=2, expert=4), model=_moe),
    "images": Case(ParallelConfig(fsdp=2), family="llava", reference=True),
    "images-lora": Case(
        ParallelConfig(fsdp=2),
        family="qwen2_5_vl",
        lora={"target_modules": ["q_proj", "v_proj", "qkv"]},  # of text and of the tower
        reference=True,
        config={"gradient_checkpointing": True},
    ),
    "images-replicas": Case(ParallelConfig(fsdp=2, replicate=2), family="qwen2_5_vl"),
}


def make_trainer(case: Case, parallel: ParallelConfig, accelerator: Accelerator | None = None) -> Trainer:
    """The trainer of a case, for one process with `WHOLE`."""
    optimizer = OptimizerConfig(learning_rate=1e-2, eps=1e-2)
    config = TrainerConfig(
        optimizer=optimizer,
        tokens_per_micro_batch=25,
        kl_weight=0.1 if case.reference else 0.0,
        teacher_weight=0.5 if case.teacher else None,
        parallel=parallel,
        **({"shared_prefixes": SharedPrefixes.AUTO} | case.config),
    )
    vision = None if case.family is None else load_vision(case.family)
    make_model = case.model if vision is None else vision.model
    model = shared(make_model(), parallel)
    reference: Any = None
    if case.lora is not None:
        model, reference = with_lora(model, **case.lora), Reference.BASE
    elif case.reference:
        reference = shared(make_model(), parallel)
    return Trainer(
        model,
        config,
        accelerator=accelerator,
        reference=reference if case.reference else None,
        images=None if vision is None else vision.images,
        teachers=Teachers(models={"teacher": shared(tiny_qwen3(seed=1), parallel)}) if case.teacher else None,
    )


@functools.cache
def load_vision(family: Family) -> Vision:
    """The same model in each process; the first one saves it."""
    folder, is_alone = [tempfile.mkdtemp()], not torch.distributed.is_initialized()
    if is_alone or torch.distributed.get_rank() == 0:
        save_vision_model(Path(folder[0]), family)
    if not is_alone:
        torch.distributed.broadcast_object_list(folder)
    return Vision.load(Path(folder[0]), family)


def rows_of(case: Case, process: int, step: int) -> list[TrainingSample]:
    """The rows of one of four processes in a step; images are in those of two of them, and in one step of all."""
    rng = np.random.default_rng(10 * step + process)
    if case.family is not None:
        vision, pictures = load_vision(case.family), [picture(56, 56), picture(28, 84, seed=1)]
        most = 3 if process >= 2 or step == 1 else 1
        return [random_image_row(vision, rng, pictures, row % most) for row in range(NUM_ROWS[process])]
    rows = random_rows(rng, NUM_ROWS[process])
    if not case.replays:
        return rows
    return [replace(row, routed_experts=_draw_experts(rng, len(row.token_ids))) for row in rows]


def _draw_experts(rng: np.random.Generator, num_ids: int) -> Any:
    order = rng.permuted(np.tile(np.arange(8, dtype=np.uint8), (num_ids - 1, 2, 1)), axis=-1)
    return np.ascontiguousarray(order[..., :2])


def run(
    case: Case, parallel: ParallelConfig, mine: list[int], accelerator: Accelerator | None = None
) -> dict[str, Any]:
    """Score, train three steps on the rows of these of four processes, and return what can be compared."""
    trainer = make_trainer(case, parallel, accelerator)
    first = [row for process in mine for row in rows_of(case, process, 0)]
    with trainer.backend.computing():
        trainer.backend.measure()
    found: dict[str, Any] = {"before": {name: weight.clone() for name, weight in trainer.named_weights()}}
    found["logprobs"] = [torch.from_numpy(each.copy()) for each in trainer.logprobs(first)]
    steps = [
        trainer.step([row for process in mine for row in rows_of(case, process, step)]) for step in range(NUM_STEPS)
    ]
    found["steps"] = [
        (
            step.loss,
            step.grad_norm,
            step.num_rows,
            step.entropy,
            step.reference_k3,
            step_metrics(step).get("teacher/kl"),
        )
        for step in steps
    ]
    found["weights"] = {name: weight.clone() for name, weight in trainer.named_weights()}
    return found


def main() -> None:
    """Run each case, and save the results of this process."""
    faulthandler.dump_traceback_later(400, exit=True)  # a process that waits for the others forever says where
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    for name in names:
        mine = list(range(4))[rank * 4 // size : (rank + 1) * 4 // size]
        torch.save(run(CASES[name], CASES[name].parallel, mine, accelerator), directory / f"{name}-{rank}.pt")
    accelerator.wait_for_everyone()
    os._exit(0)  # taking gloo's threads down in order hangs now and then, after all the work is done


def compare(directory: Path, name: str) -> dict[str, float]:
    """How far several processes are from one: logprobs, losses and norms, weights after three steps."""
    case = CASES[name]
    alone = run(case, WHOLE, [0, 1, 2, 3])
    found = [torch.load(directory / f"{name}-{rank}.pt") for rank in range(case.parallel.num_processes)]
    logprobs = [row for each in found for row in each["logprobs"]]
    pairs = zip(logprobs, alone["logprobs"], strict=True)
    off = {"logprobs": max(float((a - b).abs().nan_to_num().max()) for a, b in pairs)}
    for kind in ("before", "weights"):
        assert [list(each[kind]) for each in found] == [list(alone[kind])] * len(found)
        off[kind] = max(float((each[kind][n] - w).abs().max()) for each in found for n, w in alone[kind].items())
    assert len({str(each["steps"]) for each in found}) == 1
    numbers = zip(np.ravel(np.array(found[0]["steps"], float)), np.ravel(np.array(alone["steps"], float)), strict=True)
    off["steps"] = max(0.0 if np.isnan(b) else abs(a - b) / (1 + abs(b)) for a, b in numbers)
    return off


if __name__ == "__main__":
    main()
