"""An agent that is a command: a process of its own for each attempt."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from unbroken.errors import InvalidInputError, RewardError
from unbroken.rollout.agents.session import AgentSession

_TERM_S = 2.0
"""How long a process tree may take to end by itself."""
_MAX_OUTPUT_CHARS = 4000
"""Of a failed command's output in its error."""


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
            status = await self._run(session, work, output, errors)
            if self.reward is CommandReward.EXIT:
                return float(status == 0)
            if status != 0:
                raise ChildProcessError(f"{self.command[0]} exited with {status}: {_read_end(errors, output)}")
            return _read_reward(output) if self.reward is CommandReward.OUTPUT else None

    async def _run(self, session: AgentSession, work: Path, output: Path, errors: Path) -> int:
        variables = {**os.environ, **self.environment, **session.environment()}
        with output.open("wb") as out, errors.open("wb") as err:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err, cwd=work, env=variables,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise InvalidInputError(f"command must be a program, got {self.command[0]!r}: {error}") from None
            try:
                return await process.wait()
            finally:
                await _end_group(process)


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End what is left of a process group: first politely, if its leader still runs."""
    with suppress(ProcessLookupError, PermissionError):
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(process.wait()), _TERM_S)
        os.killpg(process.pid, signal.SIGKILL)
    if process.returncode is None:
        await process.wait()


def _read_end(*files: Path) -> str:
    texts = [file.read_text(errors="replace").strip() for file in files]
    return next((text for text in texts if text), "no output")[-_MAX_OUTPUT_CHARS:]


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
