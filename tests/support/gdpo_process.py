"""One of two processes that make units of their own groups by GDPO; a test starts it as a script.

Argument: the folder to write the advantages into, and the error of a process whose rewards have no parts.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator

from support.models import tiny_qwen3
from support.rows import group, trajectory
from unbroken.counters import Counters
from unbroken.errors import UnbrokenError
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.training.config import TrainerConfig
from unbroken.training.objective.advantages import ADVANTAGES
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.trainer import Trainer

WEIGHTS = {"correct": 1.0, "short": 0.5}
REWARDS = (
    [[(1, 2), (0, 3), (0, None)], [(1, 0), (1, 0)]],
    [[(0, 5), (1, 5), (0, 1), (1, 0)]],
)
"""Of each process: its groups, of each member the rewards of both functions."""


def member(correct: float | None, short: float | None) -> Trajectory:
    """A trajectory with the sum of two functions."""
    parts = {name: value for name, value in (("correct", correct), ("short", short)) if value is not None}
    reward = sum(WEIGHTS[name] * value for name, value in parts.items())
    return replace(trajectory(reward), reward_parts=parts, reward_weights=WEIGHTS)


def make_groups(rank: int) -> list[TrajectoryGroup]:
    """The groups of a process."""
    return [group(*(member(*rewards) for rewards in members)) for members in REWARDS[rank]]


def read_advantages(trainer: Trainer, groups: list[TrajectoryGroup]) -> list[float]:
    """The advantage of each trajectory with one."""
    units = asyncio.run(trainer.make_units(groups, Counters()))
    return [float(row.advantages[-1]) for unit in units for row in unit.rows]


def main() -> None:
    """Make the units, and then those of groups that process 1 cannot compare."""
    faulthandler.dump_traceback_later(120, exit=True)
    rank, directory = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    objective = PolicyGradient(ADVANTAGES["gdpo"])
    trainer = Trainer(tiny_qwen3(), TrainerConfig(), objective=objective, accelerator=accelerator)
    found = read_advantages(trainer, make_groups(rank))
    try:
        read_advantages(trainer, make_groups(0) if rank == 0 else [group(trajectory(1.0), trajectory(0.0))])
        error = ""
    except UnbrokenError as raised:
        error = str(raised)
    (directory / f"{rank}.json").write_text(json.dumps([found, error]))
    accelerator.wait_for_everyone()
    os._exit(0)  # taking gloo's threads down in order hangs now and then, after all the work is done


if __name__ == "__main__":
    main()
