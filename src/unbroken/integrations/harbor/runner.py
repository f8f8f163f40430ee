"""What runs terminal tasks, this machine or containers, and what verifiers give."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unbroken.rollout.agents.session import Agent


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnableTask:
    """A task that a runner has read, and found that it can run."""

    name: str
    folder: Path
    instruction: str
    agent_timeout_s: float | None
    """Seconds for the agent; None: no limit of its own."""
    attempt: Agent
    """Attempts it in a session, and verifies the attempt."""


class TaskRunner(Protocol):
    """Runs terminal tasks."""

    def read(self, folder: Path) -> RunnableTask:
        """Read the task in a folder; raises `InvalidInputError` if it cannot be run."""
        ...


def choose_reward(found: Mapping[str, Any], key: str) -> tuple[float, dict[str, float]]:
    """The number named `key`, and the others as metrics; raises `ValueError` if one is missing or not finite."""
    numbers = {str(name): check_reward(value) for name, value in found.items()}
    if key not in numbers:
        raise ValueError(
            f"it must have {key!r}, or environment_arguments.reward must name one of {', '.join(numbers) or 'none'}"
        )
    return numbers.pop(key), numbers


def check_reward(value: Any) -> float:
    """A finite number; raises `ValueError` for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"a reward must be a finite number, got {repr(value)[:100]}")
    return number
