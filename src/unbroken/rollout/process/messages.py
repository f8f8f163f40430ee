"""What the trainer's process and that of the rollouts tell each other. Orders are counted 0, 1, 2, ..."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unbroken.rollout.trajectory import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Open:
    """The first message to the rollouts."""

    facts: Any


@dataclass(frozen=True, slots=True)
class Opened:
    """Its answer, unless it is `Failed`."""


@dataclass(frozen=True, slots=True)
class Order:
    """Sample a group."""

    number: int
    order: Any


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel an order, if it still runs."""

    number: int


@dataclass(frozen=True, slots=True)
class News:
    """For `Work.tell`."""

    news: Any


@dataclass(frozen=True, slots=True)
class Sampled:
    """An order has sampled ids, of a turn that has ended."""

    number: int
    num_ids: int


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to an order."""

    number: int
    group: TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The answer to an order that was cancelled: nothing of it runs any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The error of an order, or without a number that of `Open`."""

    number: int | None
    error: Exception
