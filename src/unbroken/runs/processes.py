"""The processes of one run: `accelerate launch -m unbroken train ...` starts several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Which of the run's processes this one is."""

    index: int = 0
    num_processes: int = 1

    def select(self, numbers: Sequence[int]) -> Sequence[int]:
        """Select this process's part of the numbers that all processes share: every `num_processes`-th."""
        return numbers[self.index :: self.num_processes]


@contextmanager
def main_process_first() -> Iterator[None]:
    """Run the block in the first process, then in the others, which see its files; no `Accelerator` is needed yet."""
    # `PartialState` by itself ignores accelerate's switch for training on CPUs.
    with PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU")).main_process_first():
        yield
