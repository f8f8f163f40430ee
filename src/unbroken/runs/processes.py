"""The processes of one run: `torchrun` or `accelerate launch`, with `-m unbroken train ...`, starts several."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unbroken.errors import InvalidInputError

if TYPE_CHECKING:
    from accelerate import PartialState

_SET_BY_LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_", "MASTER_",
    "TORCHELASTIC_",
)  # fmt: skip
"""Prefixes of environment variables that say which process of a group this is."""
_LAUNCHED = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")
"""Variables of which launchers, and MPI, set one for each of their processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Which of the run's processes this one is."""

    index: int = 0
    num_processes: int = 1

    def select(self, numbers: Sequence[int]) -> Sequence[int]:
        """Select this process's part of the numbers that all processes share: every `num_processes`-th."""
        return numbers[self.index :: self.num_processes]


def uses_cpu() -> bool:
    """Whether accelerate needs `cpu=True`: without it, accelerate does not join the other processes on a CPU."""
    import torch
    from accelerate.utils import parse_flag_from_env

    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def join_processes() -> PartialState:
    """Join the run's other processes; no `Accelerator` is needed yet.

    Raises:
        InvalidInputError: a launcher was asked for several processes, and they would be a run each.
    """
    from accelerate import PartialState

    from unbroken.training.checks import check_num_processes

    state = PartialState(cpu=uses_cpu())
    check_num_processes(state.num_processes)
    if state.num_processes == 1 and _is_one_of_several():
        raise InvalidInputError(
            "accelerate launch starts one process on a CPU, whatever --num_processes is: start several with `torchrun "
            "--nproc_per_node N -m unbroken train ...` or with `accelerate launch --multi_gpu --num_processes N`, "
            "which needs no GPU; for one process, leave --num_processes and MASTER_ADDR out"
        )
    return state


@contextmanager
def main_process_first() -> Iterator[bool]:
    """Run the block in the first process, then in the others, which see its files; yields whether this is the first.

    If the block fails in one process, all raise. Raises as `join_processes` does. A process without a launcher is the
    only one, and loads no torch for it.
    """
    if not os.environ.keys() & set(_LAUNCHED):
        yield True
        return
    from unbroken.training.model.sharding import fail_together

    is_first = bool(join_processes().is_main_process)
    for is_turn in (is_first, not is_first):
        with fail_together():
            if is_turn:
                yield is_first


@contextmanager
def without_launcher() -> Iterator[None]:
    """Remove the launcher's environment variables, for processes that the block starts.

    With `TORCHELASTIC_USE_AGENT_STORE`, torch in them would look for a server of their group that does not exist, and
    libraries read `RANK` and `LOCAL_RANK` as their own.
    """
    hidden = {name: value for name, value in os.environ.items() if name.startswith(_SET_BY_LAUNCHERS)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def _is_one_of_several() -> bool:
    """Whether accelerate's launcher was asked for several processes, which it starts only on GPUs."""
    variables = os.environ
    return "ACCELERATE_MIXED_PRECISION" in variables and "MASTER_ADDR" in variables and "WORLD_SIZE" not in variables
