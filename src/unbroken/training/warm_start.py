"""The supervised rows of a run: the first steps train on them alone, the others beside the rollouts.

Which conversations a step has follows from its number alone, so a run that continues needs no state for them. Worked
example, 5 conversations, 2 a step, in their order:

    step 0    0 1        step 1    2 3        step 2    4 0        two processes: each has one of a step's two
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unbroken.rollout.seeds import EpochOrder
from unbroken.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """The supervised rows of a run, and how they are trained: alone in its first steps, then beside its rollouts."""

    conversations: Sequence[Sequence[TrainingSample]]
    """The rows of each, all of which are trained in one update."""
    order: EpochOrder
    num_steps: int
    """Steps that the run begins with, of those of `LoopConfig`."""
    per_step: int
    """Conversations of a step, over all processes."""
    learning_rate: float | None = None
    """Of these first steps; None: the optimizer's."""
    weight: float = 0.0
    """Of their loss in the steps after these."""
    process: int = 0
    num_processes: int = 1

    def take(self, step: int) -> list[TrainingSample]:
        """Take the rows of a step, of this process."""
        numbers = range(step * self.per_step + self.process, (step + 1) * self.per_step, self.num_processes)
        return [row for number in numbers for row in self.conversations[self.order.index(number)]]
