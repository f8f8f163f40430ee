"""An agent that is a command: a process of its own for each attempt."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from unbroken.errors import InvalidInputError, RewardError
from unbroken.rollout.agents.processes import read_end, run_process
from unbroken.rollout.agents.session import AgentSession


class CommandReward(StrEnum):
    """Where the reward of a command comes from."""

    NONE = "none"
    """From elsewhere: a reward function, or `finish` of the session."""
    EXIT = "exit"
    """1 if it exits with 0, else 0."""
    OUTPUT = "output"
    """The last line of its standard output, a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAgent:
    """Starts a command for each attempt, with the session in its environment (`AgentSession.environment`).

    It runs in a folder of its own, without input. When it ends, or is cancelled by a time-out, its whole process group
    is ended too. What it writes is kept as `<logs>/<session id>.log`, and as `.err`.
    """

    command: Sequence[str]
    reward: CommandReward = CommandReward.NONE
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables; those of the session win."""
    folder: Path | None = None
    """Where it runs; none: an empty folder, which is removed afterwards."""
    logs: Path | None = None
    """Where its output is kept; none: nowhere."""

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command or not all(isinstance(w, str) for w in self.command):
            raise InvalidInputError(f"command must be a list of words, the program first, got {self.command!r}")

    async def __call__(self, session: AgentSession) -> float | None:
        """Run the command to its end.

        Raises:
            InvalidInputError: the program cannot be started.
            ChildProcessError: it failed, and its exit is not the reward.
            RewardError: its last line is not a number.
        """
        with tempfile.TemporaryDirectory(prefix="unbroken-agent-") as scratch:
            logs = Path(scratch) if self.logs is None else self.logs
            logs.mkdir(parents=True, exist_ok=True)
            output, errors = logs / f"{session.session_id}.log", logs / f"{session.session_id}.err"
            work = self.folder or Path(scratch, "work")
            work.mkdir(exist_ok=True)
            variables = {**os.environ, **self.environment, **session.environment()}
            status = await run_process(self.command, folder=work, variables=variables, output=output, errors=errors)
            if self.reward is CommandReward.EXIT:
                return float(status == 0)
            if status != 0:
                raise ChildProcessError(f"{self.command[0]} exited with {status}: {read_end(errors, output)}")
            return _read_reward(output) if self.reward is CommandReward.OUTPUT else None


def _read_reward(output: Path) -> float:
    lines = output.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    try:
        reward = float(last)
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        raise RewardError(f"the last line of the command's output must be a finite number, got {last[:100]!r}")
    return reward
