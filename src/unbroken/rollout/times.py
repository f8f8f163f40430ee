"""When the turns and tool calls of a rollout happened."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTime:
    """When a tool call ran, in seconds: of `time.perf_counter` in an `Outcome`, since the rollout began in a record."""

    name: str
    status: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTimes:
    """When a turn happened, in seconds since the rollout began."""

    start_s: float
    """Its prompt is built from here on."""
    sampling_s: float
    """It is sampled from here on."""
    sampled_s: float
    """The environment has its reply from here on."""
    answered_s: float | None = None
    """The environment has answered; None if it did not."""
    calls: tuple[CallTime, ...] = ()


class Stopwatch:
    """The times of one rollout, which began when this was made."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.turns: list[TurnTimes] = []

    def read(self) -> float:
        """Seconds since the rollout began."""
        return time.perf_counter() - self.started

    def add_turn(self, *, start_s: float, sampling_s: float, sampled_s: float) -> None:
        """Add a turn that was just sampled."""
        self.turns.append(TurnTimes(start_s=start_s, sampling_s=sampling_s, sampled_s=sampled_s))

    def add_answer(self, calls: Sequence[CallTime]) -> None:
        """Add that the last turn was answered just now; `calls` have times of `time.perf_counter`."""
        own = tuple(
            replace(call, start_s=call.start_s - self.started, stop_s=call.stop_s - self.started) for call in calls
        )
        self.turns[-1] = replace(self.turns[-1], answered_s=self.read(), calls=own)
