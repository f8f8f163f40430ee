"""How long the turns of each rollout are, which depends on nothing but the rollout's numbers and the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from unbroken.simulation.config import Distribution, LengthConfig, WorkloadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTurn:
    """A turn of a rollout."""

    num_ids: int
    """Sampled ids, at least 1."""
    tool_s: float = 0.0
    """Seconds until the next turn."""


class Plan(Protocol):
    """The turns of all rollouts."""

    def turns(self, number: int, member: int) -> Sequence[PlannedTurn]:
        """The turns of a member of a group, the same in each call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPlan:
    """Draws the turns of a config."""

    config: WorkloadConfig
    seed: int

    def turns(self, number: int, member: int) -> Sequence[PlannedTurn]:
        """See `Plan`."""
        rng = np.random.default_rng([self.seed, number, member])
        lengths = [_draw(self.config.lengths, rng) for _ in range(self.config.num_turns)]
        pauses = [float(rng.uniform(*self.config.tool_s)) for _ in lengths[1:]] + [0.0]
        return [PlannedTurn(num_ids=num_ids, tool_s=tool_s) for num_ids, tool_s in zip(lengths, pauses, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """Draws from the rollouts that a run has recorded; their tools' seconds are in the engine's times."""

    members: Sequence[Sequence[int]]
    """Sampled ids of each turn of each rollout."""
    seed: int

    def turns(self, number: int, member: int) -> Sequence[PlannedTurn]:
        """See `Plan`."""
        rng = np.random.default_rng([self.seed, number, member])
        return [PlannedTurn(num_ids=num_ids) for num_ids in self.members[int(rng.integers(len(self.members)))]]


def _draw(config: LengthConfig, rng: np.random.Generator) -> int:
    match config.distribution:
        case Distribution.CONSTANT:
            length: float = config.median
        case Distribution.LOGNORMAL:
            length = float(rng.lognormal(np.log(config.median), config.sigma))
        case _:
            length = float(rng.choice(config.values))
    return int(np.clip(length, config.min_ids, config.max_ids))
