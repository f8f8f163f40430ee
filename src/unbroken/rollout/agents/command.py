"""An agent that is a command: a process group of its own for each attempt."""

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
from typing import BinaryIO

from unbroken.errors import InvalidInputError, RewardError
from unbroken.rollout.agents.session import AgentSession

_TERM_S = 2.0
"""How long a process tree may take to end by itself."""
_MAX_END_CHARS = 4000
_INHERITED = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM",
        "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR",
    }
)  # fmt: skip
"""The variables that programs need to start, in addition to LC_*: none of them holds a secret."""


class CommandReward(StrEnum):
    """Where the reward of a command comes from."""

    NONE = "none"
    """By another: a reward function, or `finish` of the session."""
    EXIT = "exit"
    """1 if it exits with 0, else 0."""
    OUTPUT = "output"
    """The last line of its standard output, a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAgent:
    """Starts a command for each attempt, with the session in its environment (`AgentSession.environment`).

    It runs in a folder of its own, without input. When it ends, or is cancelled by a time-out, its whole process group
    is ended too. What it writes is kept as `<logs>/<session id>.log`, and as `.err`.

    Of this process's variables it gets only those that programs need to start: keys, such as of a tracker or a hub, are
    not for it.
    """

    command: Sequence[str]
    reward: CommandReward = CommandReward.NONE
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables; those of the session win."""
    inherit: Sequence[str] = ()
    """Names of further variables of this process that it gets."""
    folder: Path | None = None
    """Where it runs; none: an empty folder, which is removed afterwards."""
    logs: Path | None = None
    """Where its output is kept; none: nowhere."""

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command or not all(isinstance(w, str) for w in self.command):
            raise InvalidInputError(f"command must be a list of words, the program first, got {self.command!r}")
        for name in self.inherit:
            if name not in os.environ:
                raise InvalidInputError(f"agent.inherit must name environment variables that are set, got {name!r}")

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
            names = _INHERITED.union(self.inherit)
            kept = {name: value for name, value in os.environ.items() if name in names or name.startswith("LC_")}
            variables = {**kept, **self.environment, **session.environment()}
            status = await run_process(self.command, folder=work, variables=variables, output=output, errors=errors)
            if self.reward is CommandReward.EXIT:
                return float(status == 0)
            if status != 0:
                raise ChildProcessError(f"{self.command[0]} exited with {status}: {_read_end(errors, output)}")
            return _read_reward(output) if self.reward is CommandReward.OUTPUT else None


async def run_process(
    words: Sequence[str], *, folder: Path, variables: Mapping[str, str], output: Path, errors: Path
) -> int:
    """Run a command without input to its end; returns its exit status.

    When it ends, or this is cancelled, its whole process group is ended too. `output` and `errors` get what it writes;
    only the user can read them, as programs may print what they know.

    Raises:
        InvalidInputError: the program cannot be started.
    """
    with _create(output) as out, _create(errors) as err:
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err, cwd=folder, env=dict(variables),
                start_new_session=True,
            )
        )  # fmt: skip
        try:
            process = await asyncio.shield(starting)
        except OSError as error:
            raise InvalidInputError(f"command must be a program, got {words[0]!r}: {error}") from None
        except asyncio.CancelledError:  # asyncio would kill the process, but none that it has started
            starting.add_done_callback(_kill_group)
            await asyncio.wait([starting])
            raise
    try:
        return await process.wait()
    finally:
        await _end_group(process)


def _create(file: Path) -> BinaryIO:
    return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End what is left of a process group: first politely, if its leader still runs."""
    try:
        if process.returncode is None:
            _signal_group(process, signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(process.wait()), _TERM_S)
    finally:  # also if the caller is cancelled once more
        _signal_group(process, signal.SIGKILL)
    if process.returncode is None:
        await process.wait()


def _kill_group(starting: asyncio.Task[asyncio.subprocess.Process]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        _signal_group(starting.result(), signal.SIGKILL)


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _read_end(*files: Path) -> str:
    """The end of the first of these files that has any text, for an error."""
    texts = [file.read_text(errors="replace").strip() for file in files]
    return next((text for text in texts if text), "no output")[-_MAX_END_CHARS:]


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
