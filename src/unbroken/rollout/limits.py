"""How long a rollout may get, and which limit ended it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from unbroken.errors import InvalidInputError


class Limit(StrEnum):
    """What cut a turn or ended a rollout. Stable names: they are metrics."""

    TURN = "turn"
    """`SamplingParams.max_tokens`, the most ids of one turn."""
    TURNS = "turns"
    """`Limits.max_turns`"""
    TOKENS = "tokens"
    """`Limits.max_tokens`"""
    CONTEXT = "context"
    """The engine's context length."""
    TIME = "time"
    """`Limits.timeout_s`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnBudget:
    """How many ids one turn may sample, and what sets that number."""

    max_tokens: int
    """0 or less where the prompt fills the context."""
    limit: Limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of one rollout. Reaching one is not an error: the trajectory ends with a status that says so."""

    max_turns: int = 16
    """Most engine calls."""
    max_tokens: int = 8192
    """Most ids sampled, all turns together."""
    timeout_s: float = 600.0
    """Wall clock of the whole episode in seconds: environment, tools, engine and reward."""
    close_timeout_s: float = 30.0
    """Wall clock of `Env.close` in seconds, on top of `timeout_s`: it is called after a timeout too."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidInputError(f"{name} must be a whole number >= 1, got {value!r}")
        for name in ("timeout_s", "close_timeout_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds > 0):
                raise InvalidInputError(f"{name} must be a finite number of seconds > 0, got {seconds!r}")

    def reached(self, *, num_turns: int, num_sampled: int) -> Limit | None:
        """The limit that allows no further turn, whatever its prompt is; None if there is none."""
        if num_turns >= self.max_turns:
            return Limit.TURNS
        return Limit.TOKENS if num_sampled >= self.max_tokens else None

    def turn_budget(self, *, turn_max_tokens: int, num_sampled: int, num_context_left: int) -> TurnBudget:
        """What the next turn may sample: the least of what one turn, the whole rollout and the context allow."""
        return min(
            TurnBudget(max_tokens=self.max_tokens - num_sampled, limit=Limit.TOKENS),
            TurnBudget(max_tokens=num_context_left, limit=Limit.CONTEXT),
            TurnBudget(max_tokens=turn_max_tokens, limit=Limit.TURN),
            key=lambda budget: budget.max_tokens,
        )
