"""`unbroken train` whose engine samples with weights that are LAG versions old, and nothing at the same time.

    python bench/staleness_run.py LAG 2-3 RECIPE OPTIONS    # `unbroken train RECIPE OPTIONS`; chains of 2 or 3 lookups
    python bench/staleness_run.py --warm-up SEED OUT        # the demo's model

With `loop.max_staleness` how old an id is depends on who is faster. Here each version is kept, and goes to the embedded
engine LAG versions later: after the first LAG steps, every id is exactly LAG versions old, the most that
`max_staleness` LAG allows. The loop is the synchronous one, whose queue takes older ids here, so a run needs one core,
and the same seed gives the same run. What `max_staleness` changes in the loss must be among the options.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from unbroken.cli import main as unbroken
from unbroken.demo import lookup
from unbroken.demo.config import WarmUpConfig
from unbroken.demo.warm import write_warm_model
from unbroken.runs import engines
from unbroken.training.queue import GroupQueue
from unbroken.weights.base import InProcessPublisher, WeightUpdate


class LatePublisher(InProcessPublisher):
    """Keeps each version, and publishes it `lag` versions later."""

    lag = 0

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    async def publish(
        self, named_parameters: Iterable[tuple[str, torch.Tensor]], *, policy_version: int
    ) -> WeightUpdate:
        """Publish what came `lag` versions before; nothing if the engine still has its first weights."""
        self._kept[policy_version] = {name: tensor.detach().cpu().clone() for name, tensor in named_parameters}
        late = self._kept.pop(policy_version - self.lag, None)
        if late is None:
            return WeightUpdate(num_bytes=0, seconds=0.0)
        return await super().publish(late.items(), policy_version=policy_version - self.lag)


def allow_late(queue: GroupQueue, version: int) -> int:
    """The oldest version that an id may have; in a run without `max_staleness` it is the trainer's."""
    return version - LatePublisher.lag


def main() -> int:
    """Warm up a model, or train."""
    if len(sys.argv) == 1:  # `make bench` runs each file as it is
        print("bench/staleness_run.py is a part of bench/staleness.py: nothing was measured")
        return 0
    if sys.argv[1] == "--warm-up":
        write_warm_model(Path(sys.argv[3]), WarmUpConfig(), seed=int(sys.argv[2]))
        return 0
    LatePublisher.lag, lookups = int(sys.argv[1]), sys.argv[2]
    lookup.MIN_LOOKUPS, lookup.MAX_LOOKUPS = map(int, lookups.split("-"))
    setattr(engines, "InProcessPublisher", LatePublisher)  # noqa: B010
    setattr(GroupQueue, "_get_oldest_allowed", allow_late)  # noqa: B010
    return unbroken(["train", *sys.argv[3:]])


if __name__ == "__main__":
    sys.exit(main())
