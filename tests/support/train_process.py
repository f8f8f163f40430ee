"""One of several processes that train together, each on its own rows; a test starts it as a script.

Argument: the folder to save weights and statistics into. Rank, world size and rendezvous are in torch's usual
environment variables.
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
from torch.distributed.tensor import DTensor

from support import failing, flaky_server, publishing
from support.adapted import TARGETS, with_lora
from support.architectures import tiny_model
from support.gradients import pull
from support.models import tiny_qwen3
from support.prefixes import branching_rows
from support.rows import random_pairs, random_rows, random_trajectories, unscored
from support.sharded import WHOLE, shared
from unbroken.training.backend import TrainerBackend
from unbroken.training.config import (
    OldLogprobs,
    OptimizerConfig,
    ParallelConfig,
    Reference,
    SharedPrefixes,
    TrainerConfig,
)
from unbroken.training.loss_config import (
    ClipConfig,
    Correction,
    CorrectionKind,
    DpoConfig,
    EntropyControl,
    KlConfig,
    KlEstimator,
    KlPlace,
    LossNormalization,
    ReferenceSync,
)
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.model import compilation
from unbroken.training.model.pretrained import ModelForm
from unbroken.training.model.weights import gather_adapter_weights
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.objective.pairs import PreferencePair
from unbroken.training.objective.policy_gradient import ALGORITHMS, PolicyGradient
from unbroken.training.objective.samples import TrajectoryRows
from unbroken.training.objective.supervised import make_supervised_row
from unbroken.training.teachers import Teachers
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample

NUM_ROWS = ((6, 3), (6, 0), (1, 6))
"""Per step, the rows or pairs of process 0 and of process 1: uneven on purpose."""


def config(**changes: Any) -> TrainerConfig:
    """Passes of one or two rows, and an optimizer that makes no jump where a gradient is near zero."""
    optimizer = OptimizerConfig(learning_rate=1e-2, eps=1e-2)
    return TrainerConfig(optimizer=optimizer, tokens_per_micro_batch=25, **changes)


CONFIGS = {
    "plain": config(),
    "two-minibatches": config(num_minibatches=2),
    "shared": config(shared_prefixes=SharedPrefixes.ALWAYS, gradient_checkpointing=True),
    "sequence": config(normalization=LossNormalization.SEQUENCE, kl_weight=0.1),
    "lora": config(kl_weight=0.1),
    "dpo": config(dpo=DpoConfig(beta=0.3)),
    "gspo": config(
        clip=ClipConfig(low=0.2, high=0.3), entropy_weight=0.05, num_minibatches=1, old_logprobs=OldLogprobs.SAMPLER
    ),
    "reward": config(kl_weight=0.1, kl=KlConfig(estimator=KlEstimator.K1, place=KlPlace.REWARD)),
    "followed": config(
        kl_weight=0.1,
        reference_sync=ReferenceSync(every=2, mixup=0.5),
        entropy_weight=0.3,
        entropy_control=EntropyControl(target=3.58, delta=0.1),
        num_iterations=2,
    ),
    "constant": config(
        normalization=LossNormalization.CONSTANT,
        max_trajectory_tokens=20,
        old_logprobs=OldLogprobs.RECOMPUTE,
        correction=Correction(kind=CorrectionKind.TOKEN_TRUNCATE, high=4.0),
    ),
}


KINDS = {"ddp": WHOLE, "fsdp2": ParallelConfig(fsdp=2)}
"""How the processes share the model."""


ELASTIC = ("plain", "lora", "followed")
"""Configs whose checkpoints other numbers of processes load, and sharded ones those that are not."""


OBJECTIVES = {"dpo": OnlineDpo(), "gspo": ALGORITHMS["gspo"], "reward": ALGORITHMS["reinforce_plus_plus"]}
"""Those of the other names are `PolicyGradient()`."""


def trainer_of(name: str, accelerator: Accelerator | None = None, parallel: ParallelConfig = WHOLE) -> Trainer:
    """A trainer with one of `CONFIGS`."""
    objective = OBJECTIVES.get(name, PolicyGradient())
    config = replace(CONFIGS[name], parallel=parallel)
    model = shared(tiny_qwen3(), parallel)
    reference: Any = None
    if name == "lora":
        model, reference = with_lora(model), Reference.BASE
    elif objective.needs_reference(config):
        reference = shared(tiny_qwen3(seed=1), parallel)
    return Trainer(model, config, objective=objective, accelerator=accelerator, reference=reference)


def train_alone(config_name: str) -> Trainer:
    """As `train` does, in one process with all rows."""
    trainer = trainer_of(config_name)
    for step in range(len(NUM_ROWS)):
        trainer.step([sample for rank in (0, 1) for sample in samples_of(config_name, rank, step)])
    return trainer


def trains(config_name: str, weight: str) -> bool:
    """Whether a published weight moves."""
    return config_name != "lora" or weight.split(".")[-2] in TARGETS


def samples_of(
    config_name: str, rank: int, step: int
) -> list[TrainingSample] | list[PreferencePair] | list[TrajectoryRows] | list[TrainingSample | TrajectoryRows]:
    """The rows, pairs or trajectories of one process in one step."""
    draws = {"dpo": random_pairs, "gspo": random_trajectories, "reward": random_trajectories, "shared": branching_rows}
    draw: Any = draws.get(config_name, random_rows)
    if config_name == "constant":  # an idle trajectory in each process, also in one without rows to train
        idle = random_rows(np.random.default_rng(100 * step + rank), 2 + rank)
        rows = draw(np.random.default_rng(10 * step + rank), NUM_ROWS[step][rank])
        return [*rows, *(TrajectoryRows(rows=(), idle_rows=(row,)) for row in idle)]
    if config_name == "reward":
        units = draw(np.random.default_rng(10 * step + rank), NUM_ROWS[step][rank])
        return [replace(unit, group=f"{rank} {unit.group}") for unit in units]
    return draw(np.random.default_rng(10 * step + rank), NUM_ROWS[step][rank])


def train(kind: str, config_name: str, accelerator: Accelerator, rank: int, directory: Path) -> None:
    """Train, continue with and without a checkpoint, and save weights and statistics under the names of both."""
    name, parallel = f"{kind}-{config_name}", KINDS[kind]
    trainer = trainer_of(config_name, accelerator, parallel)
    is_sharded = {
        isinstance(each, DTensor) for name, each in trainer.backend.policy.named_parameters() if "lora_" not in name
    }
    assert is_sharded == {kind == "fsdp2"}
    stats = [asdict(trainer.step(samples_of(config_name, rank, step))) for step in range(len(NUM_ROWS))]
    torch.save(dict(trainer.named_weights()), directory / f"weights-{name}-{rank}.pt")
    (directory / f"stats-{name}-{rank}.json").write_text(json.dumps(stats))
    trainer.save_pretrained(directory / f"final-{name}")
    if config_name == "lora":
        trainer.save_pretrained(directory / f"merged-{name}", form=ModelForm(merged=True))
        torch.save(
            dict(gather_adapter_weights(trainer.backend.policy.model)), directory / f"weights-adapter-{name}-{rank}.pt"
        )
    resumed = trainer_of(config_name, accelerator, parallel)
    trainer.save(directory / f"checkpoint-{name}", extra={"rank": rank})
    assert resumed.load(directory / f"checkpoint-{name}") == {"rank": rank}
    went_on = {"whole": trainer, "resumed": resumed}
    if config_name in ELASTIC:
        ddp, one = (trainer_of(config_name, accelerator, parallel) for _ in range(2))
        ddp.load(directory / f"checkpoint-ddp-{config_name}")
        assert one.load(directory / f"checkpoint-one-{config_name}") == {"rank": 0}
        went_on |= {"from-ddp": ddp, "from-one": one}
    for how, each in went_on.items():
        torch.save(dict(each.named_weights()), directory / f"weights-loaded-{how}-{name}-{rank}.pt")
        each.step(samples_of(config_name, rank, 0))
        torch.save(dict(each.named_weights()), directory / f"weights-{how}-{name}-{rank}.pt")


def train_compiled(kind: str, accelerator: Accelerator, rank: int, directory: Path) -> None:
    """Train as `plain`, with layers that are traced, and save the weights."""
    compilation.BACKEND = "eager"  # another compiler would take a minute
    changed = config(compile=True, shared_prefixes=SharedPrefixes.NEVER, parallel=KINDS[kind])
    trainer = Trainer(shared(tiny_qwen3(), KINDS[kind]), changed, accelerator=accelerator)
    for step in range(len(NUM_ROWS)):
        trainer.step(samples_of("plain", rank, step))
    torch.save(dict(trainer.named_weights()), directory / f"weights-{kind}-compiled-{rank}.pt")


def train_balanced(kind: str, accelerator: Accelerator | None, rank: int, directory: Path) -> Trainer:
    """Train a mixture of experts with its load-balancing loss, and save the weights; `rank` -1 has all rows."""
    parallel = KINDS.get(kind, WHOLE)
    model = shared(tiny_model("qwen3_moe"), parallel)
    trainer = Trainer(model, config(router_loss_weight=3.0, parallel=parallel), accelerator=accelerator)
    for step in range(len(NUM_ROWS)):
        ranks = (0, 1) if rank < 0 else (rank,)
        trainer.step([row for each in ranks for row in samples_of("plain", each, step)])
    torch.save(dict(trainer.named_weights()), directory / f"weights-{kind}-balanced-{rank}.pt")
    return trainer


def train_taught(accelerator: Accelerator | None, rank: int, directory: Path) -> Trainer:
    """Learn a teacher's most likely ids, and save the weights; `rank` -1 has all rows."""
    teachers = Teachers(models={"teacher": tiny_qwen3(seed=1)}, top_k=3)
    trainer = Trainer(tiny_qwen3(), config(teacher_weight=0.5), accelerator=accelerator, teachers=teachers)
    for step in range(len(NUM_ROWS)):
        ranks = (0, 1) if rank < 0 else (rank,)
        trainer.step([row for each in ranks for row in samples_of("plain", each, step)])
    torch.save(dict(trainer.named_weights()), directory / f"weights-ddp-taught-{rank}.pt")
    return trainer


def train_supervised(kind: str, accelerator: Accelerator | None, rank: int, directory: Path) -> Trainer:
    """Make two steps on supervised rows alone and one beside rollouts, of which one process has no supervised ones, and
    save the weights and metrics; `rank` -1 has all rows.
    """
    parallel = KINDS.get(kind, WHOLE)
    changed = replace(CONFIGS["plain"], parallel=parallel)
    trainer = Trainer(shared(tiny_qwen3(), parallel), changed, accelerator=accelerator)
    ranks = (0, 1) if rank < 0 else (rank,)
    found: list[Any] = []
    for step in range(len(NUM_ROWS)):
        drawn = [row for each in ranks for row in samples_of("plain", each, step)]
        supervised = [make_supervised_row(row.token_ids, row.loss_mask) for row in drawn]
        if step < 2:
            found.append(trainer.supervise(supervised, learning_rate=3e-3))
        else:
            beside = supervised[:1] if rank <= 0 else []
            found.append(step_metrics(trainer.step(drawn, supervised=beside, weight=0.5)))
    torch.save(dict(trainer.named_weights()), directory / f"weights-{kind}-supervised-{rank}.pt")
    (directory / f"stats-{kind}-supervised-{rank}.json").write_text(json.dumps(found))
    return trainer


def train_in_parts(kind: str, accelerator: Accelerator, rank: int, directory: Path) -> None:
    """Make one update of all rows, those of each step added by a call of its own, and save the weights."""
    parts = [unscored(samples_of("plain", rank, step)) for step in range(len(NUM_ROWS))]
    changed = replace(CONFIGS["plain"], parallel=KINDS[kind])
    backend = TrainerBackend(shared(tiny_qwen3(), KINDS[kind]), changed, accelerator=accelerator)
    for rows in parts:
        backend.forward_backward(rows, pull, weights=[0.1] * len(rows))
    backend.optimizer_step(1e-2)
    torch.save(dict(backend.named_weights()), directory / f"weights-{kind}-parts-{rank}.pt")


def train_short_of_memory(accelerator: Accelerator, rank: int, directory: Path) -> None:
    """Make an update of all rows, with passes for which the second process has no memory, and with half of them."""

    def limited(scores: Any, batch: Any) -> Any:
        value, stats = pull(scores, batch)
        if rank == 1 and batch.token_ids_BT.numel() > 30:
            value.backward(retain_graph=True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return value, stats

    rows = unscored([row for step in range(len(NUM_ROWS)) for row in samples_of("plain", rank, step)])
    for size in (50, 25):
        changed = replace(CONFIGS["plain"], tokens_per_micro_batch=size)
        backend = TrainerBackend(tiny_qwen3(), changed, accelerator=accelerator)
        for _ in range(2):
            backend.forward_backward(rows, limited, weights=[0.1] * len(rows))
            backend.optimizer_step(1e-2)
        torch.save(dict(backend.named_weights()), directory / f"weights-ddp-memory-{size}-{rank}.pt")


def main() -> None:
    """Train, and save the results of this process."""
    faulthandler.dump_traceback_later(400, exit=True)  # a process that waits for the other one forever says where
    rank, directory = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    for kind, parallel in KINDS.items():
        for config_name in CONFIGS:
            train(kind, config_name, accelerator, rank, directory)
        train_balanced(kind, accelerator, rank, directory)
        train_supervised(kind, accelerator, rank, directory)
        train_in_parts(kind, accelerator, rank, directory)
        publishing.run(kind, parallel, accelerator, rank, directory)
        flaky_server.run(kind, parallel, accelerator, rank, directory)
        if kind == "fsdp2":
            train_compiled(kind, accelerator, rank, directory)
        if kind == "ddp":
            failing.run(accelerator, rank, directory)
            train_taught(accelerator, rank, directory)
            train_short_of_memory(accelerator, rank, directory)
    accelerator.wait_for_everyone()
    os._exit(0)  # taking gloo's threads down in order hangs now and then, after all the work is done


if __name__ == "__main__":
    main()
