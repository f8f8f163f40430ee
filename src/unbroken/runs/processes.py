"""Which of several processes this is: `accelerate launch -m unbroken train ...` starts as many as it is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env


@contextmanager
def main_process_first() -> Iterator[None]:
    """The block is for the first process, and then for the others: what the first one writes, they find.

    May come before the run's `Accelerator`, which finds the same processes.
    """
    # `PartialState` alone takes no notice of accelerate's own switch for training on CPUs.
    with PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU")).main_process_first():
        yield
