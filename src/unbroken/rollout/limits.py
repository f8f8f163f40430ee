"""Limits on the length of a rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from unbroken.errors import InvalidInputError


def is_duration(value: object) -> bool:
    """Whether a value is a finite number of seconds above 0."""
    return type(value) is not bool and isinstance(value, (int, float)) and math.isfinite(value) and value > 0


class Limit(StrEnum):
    """The limit that cut a turn or ended a rollout. The names are metrics and must stay stable."""

    TURN = "turn"
    """`SamplingParams.max_tokens`, the maximum number of tokens of one turn."""
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
    """How many tokens one turn may sample, and which limit sets that number."""

    max_tokens: int
    """0 or less if the prompt fills the context."""
    limit: Limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one rollout. Reaching one is not an error: the trajectory ends with a status that says so."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "close_timeout_s": "it is 30 s, three times what a container gets to stop",
        "turn_timeout_s": "it is an hour, in which the slowest engine ends a reply or hangs",
    }
    """Fields that are no settings of a run, and why."""

    max_turns: int = 16
    """Maximum number of turns. Raise it where `counters/limits` says that it ends many episodes."""
    max_tokens: int = 8192
    """Maximum number of tokens sampled in all turns together. Raise it where `counters/limits` says that it
    ends many episodes."""
    timeout_s: float = 600.0
    """Seconds that the environment, its tools and its reward, or an agent, may take for the whole episode. Waiting for
    the engine does not count, however busy it is."""
    turn_timeout_s: float = 3600.0
    """Wall-clock seconds for one reply of the policy: its prompt, the engine's queue and sampling. After that the
    episode has failed; it is no time-out of the policy's own. Agents have the server's request_timeout_s instead."""
    close_timeout_s: float = 30.0
    """Wall-clock seconds for `Env.close`, in addition to `timeout_s`, because it is also called after a timeout."""
    max_result_chars: int | None = 100_000
    """Characters of one tool result (or of the text of a tool's exception) that the model sees; None: all.

    Of a longer one the middle is cut, with a mark in its place, and `cuts/tool_result` is counted. The default is
    about 25,000 tokens of English."""

    thinking_tokens: int | None = None
    """Sampled ids of one turn after which reasoning that is still open is closed by the template's own end of it, and
    the turn goes on; None: never. Set it where reasoning leaves no room for answers (`counters/truncations`).

    The ids that close it are given: without loss, counted as `rollout/given_ids`. Not for agents."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidInputError(f"{name} must be a whole number >= 1, got {value!r}")
        for name in ("timeout_s", "turn_timeout_s", "close_timeout_s"):
            seconds = getattr(self, name)
            if not is_duration(seconds):
                raise InvalidInputError(f"{name} must be a finite number of seconds > 0, got {seconds!r}")
        for name in ("max_result_chars", "thinking_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidInputError(f"{name} must be a whole number >= 1 or None, got {value!r}")

    def find_reached(self, *, num_turns: int, num_sampled: int) -> Limit | None:
        """Find the limit that allows no further turn, whatever its prompt; None if a turn is allowed."""
        if num_turns >= self.max_turns:
            return Limit.TURNS
        return Limit.TOKENS if num_sampled >= self.max_tokens else None

    def compute_turn_budget(self, *, turn_max_tokens: int, num_sampled: int, num_context_left: int) -> TurnBudget:
        """Compute how many tokens the next turn may sample: the least that turn, rollout and context allow."""
        left = {
            Limit.TOKENS: self.max_tokens - num_sampled,
            Limit.CONTEXT: num_context_left,
            Limit.TURN: turn_max_tokens,
        }
        limit = min(left, key=left.__getitem__)
        return TurnBudget(max_tokens=left[limit], limit=limit)
